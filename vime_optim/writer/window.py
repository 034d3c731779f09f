"""Device tensors on their way to a file: through one small host buffer, a piece at a time.

A save that the training waits for needs no copy of the whole state on the host. Allocating pinned
memory for one took longer than the write (2.3 s of 3.6 s for 8.5 GB on an H200), and it stayed
allocated. To copy a piece takes a thirtieth of the time of its write, and the writers of the
other files go on meanwhile, so nothing is gained by copying ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

WINDOW_BYTES = 8 << 20


class HostWindow:
    """A reused host buffer of one writer thread.

    Args:
        size_bytes: the most that one piece may have.
    """

    def __init__(self, size_bytes: int = WINDOW_BYTES) -> None:
        self._size_bytes = size_bytes
        self._buffer: torch.Tensor | None = None

    def pieces(self, source: torch.Tensor, settle: Callable[[], None]) -> Iterator[memoryview]:
        """The bytes of `source` in order, each piece valid until the next one is asked for.

        Args:
            source: uint8, 1-D, contiguous, on a device. Work on it that is still queued on a
                stream other than this thread's must have been waited for.
            settle: returns when nobody reads the piece that was handed out any more.
        """
        for start in range(0, source.numel(), self._size_bytes):
            piece = source[start : start + self._size_bytes]
            room = self._room()[: piece.numel()]
            room.copy_(piece)  # returns when the bytes are there
            yield memoryview(room.numpy())  # type: ignore[arg-type]
            settle()

    def _room(self) -> torch.Tensor:
        if self._buffer is None:
            self._buffer = torch.empty(self._size_bytes, dtype=torch.uint8, pin_memory=True)
        return self._buffer

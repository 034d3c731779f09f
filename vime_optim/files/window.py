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

    Pieces lie one after the other in it, so that many small tensors cost one wait, not one each.

    Args:
        size_bytes: the most that one piece may have.
    """

    def __init__(self, size_bytes: int = WINDOW_BYTES) -> None:
        self._size_bytes = size_bytes
        self._used_bytes = 0
        self._buffer: torch.Tensor | None = None

    def pieces(self, source: torch.Tensor, settle: Callable[[], None]) -> Iterator[memoryview]:
        """The bytes of `source` in order, each piece valid until `settle` is called.

        Args:
            source: uint8, 1-D, contiguous, on a device. Work on it that is still queued on a
                stream other than this thread's must have been waited for.
            settle: returns when nobody reads the pieces that were handed out any more. Called
                when the window is full, perhaps in the middle of a later tensor.
        """
        done = 0
        while done < source.numel():
            if self._used_bytes == self._size_bytes:
                settle()
                self._used_bytes = 0
            piece = source[done : done + self._size_bytes - self._used_bytes]
            end = self._used_bytes + piece.numel()
            room = self._room()[self._used_bytes : end]
            room.copy_(piece)  # returns when the bytes are there
            self._used_bytes = end
            done += piece.numel()
            yield memoryview(room.numpy())  # type: ignore[arg-type]

    def _room(self) -> torch.Tensor:
        if self._buffer is None:
            self._buffer = torch.empty(self._size_bytes, dtype=torch.uint8, pin_memory=True)
        return self._buffer

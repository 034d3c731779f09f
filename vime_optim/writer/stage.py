"""Staging: a save's host tensors are copied into a reused buffer, so that no update has to wait.

The buffer is shared memory, allocated once and grown on demand up to the budget
(VIME_OPTIM_STAGE_BYTES). Tensors that do not fit are handed over by reference and guarded.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from vime_optim.writer.guard import InFlightSave

_ALIGNMENT_BYTES = 64
_GROWTH = 1.1  # a state that grows a little (a later step's tensors) does not reallocate each time


class StagingBuffer:
    """One reused host buffer in shared memory.

    Args:
        budget_bytes: the most it may ever hold.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._buffer: torch.Tensor | None = None
        self._user: InFlightSave | None = None

    @property
    def allocated_bytes(self) -> int:
        return 0 if self._buffer is None else self._buffer.numel()

    def stage(self, tensors: Iterable[torch.Tensor], save: InFlightSave) -> dict[int, torch.Tensor]:
        """Copy tensors while they fit; waits for the save that still uses the buffer.

        Returns:
            id of a tensor -> its copy, for those that were copied.

        Raises:
            RuntimeError: no shared memory of that size is to be had (from torch).
        """
        self._wait_for_user()
        chosen, needed_bytes = self._choose(tensors)
        self._grow(needed_bytes)
        copies: dict[int, torch.Tensor] = {}
        offset = 0
        for tensor in chosen:
            nbytes = tensor.numel() * tensor.element_size()
            copies[id(tensor)] = self._copy(tensor, offset, nbytes)
            offset += _aligned(nbytes)
        if copies:
            self._user = save
        return copies

    def _wait_for_user(self) -> None:
        if self._user is not None:
            from vime_optim.writer.guard import wait_for

            wait_for(self._user)
            self._user = None

    def _choose(self, tensors: Iterable[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
        chosen: list[torch.Tensor] = []
        seen: set[int] = set()
        total_bytes = 0
        for tensor in tensors:
            nbytes = _aligned(tensor.numel() * tensor.element_size())
            if id(tensor) in seen or total_bytes + nbytes > self.budget_bytes:
                continue
            seen.add(id(tensor))
            chosen.append(tensor)
            total_bytes += nbytes
        return chosen, total_bytes

    def _grow(self, needed_bytes: int) -> None:
        if needed_bytes <= self.allocated_bytes:
            return
        self._buffer = None  # first free, then allocate: never two buffers at a time
        size = min(self.budget_bytes, int(needed_bytes * _GROWTH))
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._buffer = buffer.share_memory_()  # type: ignore[no-untyped-call]

    def _copy(self, tensor: torch.Tensor, offset: int, nbytes: int) -> torch.Tensor:
        assert self._buffer is not None or nbytes == 0
        if self._buffer is None:
            return tensor.detach().clone()
        room = self._buffer[offset : offset + nbytes].view(tensor.dtype).view(tensor.shape)
        room.copy_(tensor.detach())
        return room


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


_buffer: StagingBuffer | None = None


def buffer_of_process(budget_bytes: int) -> StagingBuffer:
    """The staging buffer of this process; a changed budget starts a new one."""
    global _buffer
    if _buffer is None or _buffer.budget_bytes != budget_bytes:
        _buffer = StagingBuffer(budget_bytes)
    return _buffer


def release() -> None:
    """Give the buffer back."""
    global _buffer
    _buffer = None

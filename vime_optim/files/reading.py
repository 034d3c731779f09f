"""Reads boxes of stored chunks straight into tensors, with several threads and bounded staging.

Threads only call preadv, into memory that the calling thread chose: the destination itself where it
is contiguous host memory of the stored dtype, otherwise one of a few reused buffers (pinned where
the destination is on a device) that the calling thread copies from. All torch calls stay in the
calling thread, so streams and modes are its own.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from vime_optim.files.cores import own_cores
from vime_optim.files.filling import Source, fill
from vime_optim.files.geometry import row_major, tiles
from vime_optim.files.plain import require_plain, unreadable

PIECE_BYTES = 8 << 20
"""What one thread reads into a destination in one go."""

STAGING_BYTES = 64 << 20
"""Reused buffers of one reader, all together, at most."""

_STAGING_SHARE = 64  # and at most this part of all that is to be read
_MIN_STAGING_BYTES = 1 << 20
_MAX_THREADS = 16
_MAX_FILES = 64


@dataclass(slots=True)
class _Slot:
    """A staging buffer (uint8, 1-D, host) and when a copy out of it will be over."""

    buffer: torch.Tensor
    copied: Any = None


@dataclass(slots=True)
class _Entry:
    """A piece under way, or (`future` None) the end of a box: what is called once it is there."""

    future: Future[None] | None
    slot: _Slot | None = None
    staged: torch.Tensor | None = None
    target: torch.Tensor | None = None
    done: Callable[[], None] | None = None


class BoxReader:
    """Reads boxes; use as a context manager. Boxes are there, in order, when `done` is called.

    Args:
        total_bytes: about what will be read; small loads get small buffers.
        threads: threads that read; chosen by the machine when left out.
    """

    def __init__(self, total_bytes: int, threads: int | None = None) -> None:
        self._threads = threads or default_threads()
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="vime-read")
        self._files: dict[str, int] = {}
        self._entries: deque[_Entry] = deque()
        wanted = max(_MIN_STAGING_BYTES, min(STAGING_BYTES, total_bytes // _STAGING_SHARE))
        self._slots_allowed = self._threads + 1
        self._slot_bytes = wanted // self._slots_allowed & -4096
        self._free: dict[bool, deque[_Slot]] = {False: deque(), True: deque()}
        self._made = 0

    def __enter__(self) -> BoxReader:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        try:
            if kind is None:
                self.drain()
        finally:
            # Threads write into tensors of the caller: never leave before they ended.
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._close_files()
            self._wait_for_copies()

    def open(self, path: str) -> int:
        """A file descriptor for reading, closed with the reader.

        Raises:
            CheckpointError: the file cannot be opened.
        """
        descriptor = self._files.get(path)
        if descriptor is None:
            if len(self._files) >= _MAX_FILES:
                self.drain()
                self._close_files()
            try:
                # A pipe would hold up a blocking open, and a device reads without an end.
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError as error:
                raise unreadable(path, error) from error
            self._files[path] = descriptor
            require_plain(path, os.fstat(descriptor).st_mode)
        return descriptor

    def read(
        self, source: Source, target: torch.Tensor, done: Callable[[], None] | None = None
    ) -> None:
        """Start to read a box into `target` (its shape; any strided tensor, dtype and device).

        Args:
            done: called by the calling thread, here or in a later call, when `target` holds it.
        """
        descriptor = self.open(source.path)
        is_direct = target.dtype == source.dtype and target.device.type == "cpu"
        # What is not contiguous goes through a buffer, even if neither dtype nor device differs.
        needs_no_buffer = is_direct and target.is_contiguous()
        limit_bytes = PIECE_BYTES if needs_no_buffer else self._slot_bytes
        strides = row_major(source.shape)
        for box in tiles(source.size, limit_bytes // source.dtype.itemsize):
            part = target if box.size == source.size else target[box.slices]
            if is_direct and part.is_contiguous():
                entry = _Entry(None)
                memory = part
            else:
                entry = self._staged(source, part, box.size)
                assert entry.staged is not None
                memory = entry.staged
            wanted = box.moved(source.offset)
            out = _bytes_of(memory)
            entry.future = self._pool.submit(fill, descriptor, source, strides, wanted, out)
            self._entries.append(entry)
        self._entries.append(_Entry(None, done=done))

    def drain(self) -> None:
        """Wait for everything that was started."""
        while self._entries:
            self._finish_first()
        self._wait_for_copies()

    def _staged(self, source: Source, part: torch.Tensor, size: tuple[int, ...]) -> _Entry:
        slot = self._slot(pinned=part.device.type == "cuda")
        nbytes = prod(size) * source.dtype.itemsize
        return _Entry(None, slot, slot.buffer[:nbytes].view(source.dtype).view(size), part)

    def _slot(self, pinned: bool) -> _Slot:
        free = self._free[pinned]
        while not free and self._made >= self._slots_allowed and self._entries:
            self._finish_first()
        if free:
            slot = free.popleft()
            if slot.copied is not None:
                slot.copied.synchronize()
                slot.copied = None
            return slot
        if self._made >= self._slots_allowed:  # all are of the other kind, and free
            self._free[not pinned].popleft()
            self._made -= 1
        self._made += 1
        return _Slot(_host_buffer(self._slot_bytes, pinned))

    def _finish_first(self) -> None:
        entry = self._entries.popleft()
        if entry.future is None:
            if entry.done is not None:
                entry.done()
            return
        entry.future.result()
        if entry.slot is None or entry.target is None or entry.staged is None:
            return
        on_device = entry.target.device.type == "cuda"
        entry.target.copy_(entry.staged, non_blocking=on_device)
        if on_device:
            entry.slot.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            entry.slot.copied.record(torch.cuda.current_stream(entry.target.device))
        self._free[on_device].append(entry.slot)

    def _wait_for_copies(self) -> None:
        for slot in self._free[True]:
            if slot.copied is not None:
                slot.copied.synchronize()

    def _close_files(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()


def default_threads() -> int:
    """Threads that read, of this process: a thread waits for the file more than it works."""
    return max(2, min(_MAX_THREADS, own_cores()))


def _host_buffer(nbytes: int, pinned: bool) -> torch.Tensor:
    if pinned:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:
            pass  # no more memory may be locked; plain memory does, only slower
    return torch.empty(nbytes, dtype=torch.uint8)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous host tensor; strides of axes of length one may be anything."""
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return flat.numpy().data

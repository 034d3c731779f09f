"""Host buffers for copies of units: bounded, reused, pinned where a device copies into them.

At most VIME_OPTIM_STAGE_BYTES are held for copies, and never the last twentieth of the machine's
memory. A writer that has to bring a unit from the device takes a buffer beyond that bound, so that
it never waits for copies that only it can write; those are few, one a file.
"""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from vime_optim import settings
from vime_optim.async_save import units


@dataclass(eq=False)
class Room:
    """One buffer (uint8, 1-D, host)."""

    buffer: torch.Tensor
    pinned: bool


class StagePool:
    """The buffers of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[Room] = []
        self.allocated_bytes = 0
        self.peak_bytes = 0

    def take(self, nbytes: int, pinned: bool, *, force: bool = False) -> Room | None:
        """A buffer of at least `nbytes`, None when the bound is reached (never with `force`)."""
        with self._lock:
            for room in reversed(self._free):
                if room.buffer.numel() >= nbytes and (room.pinned or not pinned):
                    self._free.remove(room)
                    return room
            size_bytes = max(nbytes, units.UNIT_BYTES)
            if not force and not self._may_grow(size_bytes):
                return None
            self._count(size_bytes)
        return self._allocate(size_bytes, pinned)

    def give(self, room: Room) -> None:
        """Hand a buffer back; one beyond the bound is freed."""
        with self._lock:
            if self.allocated_bytes > settings.current().stage_bytes:
                self._count(-room.buffer.numel())
            else:
                self._free.append(room)

    def make_ready(self) -> bool:
        """Have one more free buffer with its memory in place. False at the bound."""
        with self._lock:
            if not self._may_grow(units.UNIT_BYTES):
                return False
            self._count(units.UNIT_BYTES)
        room = self._allocate(units.UNIT_BYTES, pinned=False)
        # The kernel gives memory at the first touch, slowly. One thread: torch's would spin.
        ctypes.memset(room.buffer.data_ptr(), 0, room.buffer.numel())
        with self._lock:
            self._free.append(room)
        return True

    @property
    def free(self) -> int:
        return len(self._free)

    def release(self) -> None:
        """Free what is not in use."""
        with self._lock:
            self._count(-sum(room.buffer.numel() for room in self._free))
            self._free.clear()

    def _allocate(self, size_bytes: int, pinned: bool) -> Room:
        pinned = pinned and uses_devices()
        try:
            return Room(torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned), pinned)
        except BaseException:
            with self._lock:
                self._count(-size_bytes)
            raise

    def _count(self, nbytes: int) -> None:
        self.allocated_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

    def _may_grow(self, nbytes: int) -> bool:
        within = self.allocated_bytes + nbytes <= settings.current().stage_bytes
        return within and _memory_is_left(nbytes)


def uses_devices() -> bool:
    """Whether this process works on real devices (a simulated one is host memory)."""
    simulated = not torch.cuda.Stream.__module__.startswith("torch.")
    return not simulated and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _memory_is_left(nbytes: int) -> bool:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return True
    values = {key: int(rest.split()[0]) << 10 for key, rest in (x.split(":", 1) for x in lines)}
    available = values.get("MemAvailable")
    return available is None or available - nbytes > values["MemTotal"] // 20


pool = StagePool()

_copiers: ThreadPoolExecutor | None = None
_COPIERS = 4  # one thread copies some 10 GB/s, four of them what the memory allows


def copiers() -> ThreadPoolExecutor:
    """Threads that copy units while an update waits for them."""
    global _copiers
    if _copiers is None:
        _copiers = ThreadPoolExecutor(_COPIERS, thread_name_prefix="vime_optim copy")
    return _copiers


def forget_threads() -> None:
    """In a forked child: the threads are not there, and locks may be held for ever."""
    global _copiers, pool
    _copiers = None
    pool = StagePool()

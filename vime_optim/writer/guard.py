"""Async saves that are still being written, and the updates that have to wait for them.

A worker that got a tensor's memory by reference (shared memory with a spawned worker; memory mapped
shared, such as pinned memory, with a forked one) reads it while the training goes on. The next
in-place update of such a storage would end up in the checkpoint (F19), so it waits here until the
worker is through. Storages decide: an update of any other storage goes on at once.
"""

from __future__ import annotations

import bisect
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from vime_optim import installer

logger = logging.getLogger(__name__)

_POLL_S = 0.005
_active: list[InFlightSave] = []
_step_hook: Any = None
_warned = False


class InFlightSave:
    """One save that a worker has been handed.

    Attributes:
        call_idx: Megatron's number of the call.
        complete: the worker is through with it, or dead.
        failure: why the save is unsound; None while nothing is known against it.
        kept: objects that have to live until the save is complete.
    """

    def __init__(self, call_idx: int, channel: Any, poll: Callable[[InFlightSave], None]) -> None:
        self.call_idx = call_idx
        self.channel = channel
        self.complete = False
        self.failure: str | None = None
        self.kept: list[Any] = []
        self.process: Any = None
        self.started_s = time.monotonic()
        self._poll = poll
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._versions: list[tuple[torch.Tensor, int]] = []

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Declare these host tensors as read by the worker until the save is complete."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._storages[_identity(storage)] = storage
            if not tensor.is_inference():  # those have no version
                self._versions.append((tensor, tensor._version))

    @property
    def held_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages.values())

    def holds_any(self, identities: set[int]) -> bool:
        return not self._storages.keys().isdisjoint(identities)

    def poll(self) -> bool:
        """Look whether the worker is through. Never blocks."""
        if not self.complete:
            self._poll(self)
        return self.complete

    def fail(self, reason: str) -> None:
        """Make the save raise when it is finalized. The first reason stays."""
        if self.failure is None:
            self.failure = reason
            if hasattr(self.channel, "failure"):
                self.channel.failure = reason

    def mark_complete(self) -> None:
        """The worker does not read any more: check that nothing was torn, let go of everything."""
        if self.complete:
            return
        self.complete = True
        if any(tensor._version != version for tensor, version in self._versions):
            self.fail(
                "a tensor was updated in place while its checkpoint was being written, by code"
                " that does not wait for the save; the checkpoint would be torn"
            )
        self._storages.clear()
        self._versions.clear()
        self.kept.clear()
        if self in _active:
            _active.remove(self)
        _update_step_hook()


def register(save: InFlightSave) -> None:
    """Watch a save until it is complete."""
    _active.append(save)
    _update_step_hook()


def in_flight() -> tuple[InFlightSave, ...]:
    return tuple(_active)


def before_update(tensors: Iterable[torch.Tensor] | None) -> None:
    """Wait until no save in flight holds the storage of one of `tensors` (None: any storage).

    A wait is counted in status() as 'async save waits', with their milliseconds, and the first
    one of a process is logged as a warning with its seconds.
    """
    if not _active:
        return
    identities = None if tensors is None else {_identity(t) for t in _storages_of(tensors)}
    for save in tuple(_active):
        concerned = save.held_bytes > 0 if identities is None else save.holds_any(identities)
        if concerned and not save.poll():
            _wait(save)


def wait_for(save: InFlightSave) -> None:
    """Wait for one save, whatever it holds."""
    if not save.poll():
        _wait(save)


def _wait(save: InFlightSave) -> None:
    global _warned
    began = time.monotonic()
    while not save.poll():
        time.sleep(_POLL_S)
    waited_s = time.monotonic() - began
    installer.counters["async save waits"] += 1
    installer.counters["async save waits, milliseconds"] += round(1000 * waited_s)
    if not _warned:
        _warned = True
        logger.warning(
            "vime_optim: an update waited %.2f s for the async checkpoint that was still being"
            " written from the same memory (VIME_OPTIM_ASYNC=stage copies instead of waiting)."
            " Later waits are only counted, see vime_optim.status().",
            waited_s,
        )


def optimizer_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Tensors that an update of this optimizer (torch's or Megatron's) may change in place."""
    seen: set[int] = set()
    stack = [optimizer]
    while stack:
        current = stack.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        if isinstance(current, torch.Tensor):
            yield current
        elif isinstance(current, (list, tuple, set, frozenset)):
            stack.extend(current)
        elif isinstance(current, dict):
            stack.extend(current.keys() if _keyed_by_tensor(current) else ())
            stack.extend(current.values())
        elif _is_update_owner(current):
            stack.extend(vars(current).values())


def _keyed_by_tensor(mapping: dict[Any, Any]) -> bool:
    return isinstance(next(iter(mapping), None), torch.Tensor)


def _is_update_owner(obj: Any) -> bool:
    """Optimizers of torch and Megatron, and Megatron's parameter buffers and buckets."""
    if isinstance(obj, torch.optim.Optimizer):
        return True
    cls = type(obj)
    return cls.__module__.startswith("megatron.core.optimizer") or cls.__name__ in {
        "_ParamAndGradBuffer",
        "_ParamAndGradBucket",
        "_ParamAndGradBucketGroup",
    }


def _before_torch_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    before_update(optimizer_tensors(optimizer))


def _update_step_hook() -> None:
    """Every step of every torch optimizer passes this hook, but only while a save is in flight."""
    global _step_hook
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    needed = any(save.held_bytes for save in _active)
    if needed and _step_hook is None:
        _step_hook = register_optimizer_step_pre_hook(_before_torch_step)
    elif not needed and _step_hook is not None:
        _step_hook.remove()
        _step_hook = None


def _identity(storage: torch.UntypedStorage) -> int:
    # The C++ storage: it stays when sharing moves the bytes, and every view has the same.
    return int(storage._cdata)


def _storages_of(tensors: Iterable[torch.Tensor]) -> Iterator[torch.UntypedStorage]:
    for tensor in tensors:
        if is_host(tensor):
            yield tensor.untyped_storage()


def is_host(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes lie in host memory. True for simulated device tensors too: what
    counts is the memory, not what it stands for."""
    with torch._C.DisableTorchFunction():
        return tensor.layout is torch.strided and tensor.device.type == "cpu"


class SharedMappings:
    """The address ranges of this process that a forked child would share, not copy on write.

    Memory of share_memory_(), of files and of the CUDA driver (pinned memory) is mapped shared.
    """

    def __init__(self, maps: str | os.PathLike[str] = "/proc/self/maps") -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        try:
            with open(maps, encoding="utf-8", errors="replace") as file:
                for line in file:
                    span, flags = line.split(maxsplit=2)[:2]
                    if flags.endswith("s"):
                        start, end = span.split("-")
                        self._starts.append(int(start, 16))
                        self._ends.append(int(end, 16))
            self.known = True
        except OSError:
            self.known = False  # no /proc: take everything as shared

    def contains(self, tensor: torch.Tensor) -> bool:
        if not self.known:
            return True
        address = tensor.untyped_storage().data_ptr()
        index = bisect.bisect_right(self._starts, address) - 1
        return index >= 0 and address < self._ends[index]

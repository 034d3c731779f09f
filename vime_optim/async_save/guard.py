"""Saves in flight, and every place where memory that they read may change.

- The step of a torch optimizer, part by part, and what follows it (parameters copied from their
  masters, gathered from other ranks, clipped): hooks of torch, only while a save is in flight.
- `load_state_dict`, `reload_model_params`, `offload_to_cpu`, a load, a storage that is freed:
  wrapped in fixes/writer_async.py.
- torch_memory_saver takes device memory away behind everybody's back: with it, device memory is
  copied before the save returns, as Megatron does.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from vime_optim.async_save import stage
from vime_optim.async_save.job import SaveJob
from vime_optim.optimizer import update_order


class InFlight(Protocol):
    """A save that may still read memory of the training."""

    def poll(self) -> bool: ...
    def wait(self) -> None: ...
    def abort(self, reason: str) -> None: ...
    def before_owner(self, optimizer: Any, *, after: bool) -> None: ...
    def before_change(self, tensors: Iterable[torch.Tensor] | None) -> None: ...


_active: list[InFlight] = []
_hooks: list[Any] = []
last_waits_s: dict[str, float] = {}
"""Seconds that updates waited for the last save, by the first tensor that each waited for."""


def in_flight() -> list[InFlight]:
    """Saves that are not through, oldest first."""
    _active[:] = [save for save in _active if not save.poll()]
    if not _active:
        _remove_hooks()
    return list(_active)


def start(job: SaveJob) -> None:
    """Begin a save by threads; it writes when the ones before it are through."""
    global last_waits_s
    last_waits_s = job.waits_s
    previous = [save for save in in_flight() if isinstance(save, SaveJob)]
    job.start(previous[-1] if previous else None)
    if "torch_memory_saver" in sys.modules:
        job.settle([unit for unit in job.units if unit.on_device])
    register(job)


def register(save: InFlight) -> None:
    _active.append(save)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
        _hooks.append(register_optimizer_step_post_hook(_after_step))


def _remove_hooks() -> None:
    for hook in _hooks:
        hook.remove()
    _hooks.clear()


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for save in in_flight():
        save.before_owner(optimizer, after=False)


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for save in in_flight():
        save.before_owner(optimizer, after=True)


def before_change(tensors: Iterable[torch.Tensor] | None = None) -> None:
    """These tensors (None: anything) are about to change: copy or wait for what is in a save."""
    if _active:
        tensors = None if tensors is None else list(tensors)
        for save in in_flight():
            save.before_change(tensors)


def before_change_of(storage: torch.UntypedStorage) -> None:
    """A storage is about to be freed or moved."""
    if _active and storage.nbytes() and storage.device.type != "meta":
        before_change([torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)])


def before_megatron_step(optimizer: Any) -> None:
    """A Megatron optimizer is about to step."""
    update_order.note(optimizer)
    inner = getattr(optimizer, "optimizer", None)
    if _active and inner is not None and not isinstance(inner, torch.optim.Optimizer):
        before_change(update_order.tensors_in(optimizer))  # nobody calls our hooks


def finish_all() -> None:
    """Wait until every save is written (not finalized), and give the buffers back."""
    for save in in_flight():
        save.wait()
    in_flight()
    stage.pool.release()


def _stop_all() -> None:
    """At exit: a save that is not finalized now never will be."""
    for save in list(_active):
        save.abort("the process ends")


def _forget() -> None:
    """In a forked child, where no writer runs."""
    _active.clear()
    _remove_hooks()
    stage.forget_threads()


atexit.register(_stop_all)
os.register_at_fork(after_in_child=_forget)

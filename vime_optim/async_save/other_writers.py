"""Requests of other writers (multi-storage client, stream extensions, a framework's own).

Megatron's process writes them. It may read host memory of the training (shared with a persistent
worker, mapped shared with a forked one), so everything that changes any of it waits for the whole
save. Every wait looks at the process as well as at its queue, which a dead one never fills.
"""

from __future__ import annotations

import functools
import logging
import queue
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from vime_optim import settings
from vime_optim.async_save import guard
from vime_optim.counters import counters
from vime_optim.optimizer import update_order

logger = logging.getLogger(__name__)
_POLL_S = 0.02


class ProcessSave:
    """One save in a process.

    Args:
        caller: Megatron's, which has the process.
        saves: the caller's saves that are not finalized, oldest first.
        call_idx: Megatron's number of the call.
        tensors: host tensors that the process reads by reference.
    """

    def __init__(
        self, caller: Any, saves: deque[Any], call_idx: int, tensors: list[torch.Tensor]
    ) -> None:
        self.call_idx = call_idx
        self.process = process_of(caller)
        self.over = False
        self._completions = queue_of(caller, "comp_q")
        self._saves = saves
        self._tensors = tensors

    def poll(self) -> bool:
        if not self.over:
            dead = is_dead(self.process)  # asked first: what it sent before is then in the pipe
            self._take_completions(wait_s=0.2 if dead else 0.0)
            if dead:
                if not self.over and self.process.exitcode != 0:
                    logger.error("vime_optim: %s", describe_death(self.process))
                self._end()
        return self.over

    def _take_completions(self, wait_s: float) -> None:
        while self._completions is not None:
            try:
                self._completions.get(timeout=wait_s) if wait_s else self._completions.get_nowait()
            except (queue.Empty, OSError, EOFError):
                return
            # The worker does them in order.
            for save in self._saves:
                if isinstance(save, ProcessSave) and not save.over:
                    save._end()
                    break

    def _end(self) -> None:
        self.over = True
        self._tensors.clear()

    def wait(self) -> None:
        while not self.poll():
            time.sleep(_POLL_S)

    def abort(self, reason: str) -> None:
        self._end()

    def before_owner(self, optimizer: Any, *, after: bool) -> None:
        if not after:
            self.before_change(update_order.tensors_in(optimizer))

    def before_change(self, tensors: Iterable[torch.Tensor] | None) -> None:
        if self._tensors and not self.poll() and (tensors is None or self._reads_any(tensors)):
            began = time.monotonic()
            self.wait()
            counters["async save waits"] += 1
            waited_ms = round(1000 * (time.monotonic() - began))
            counters["async save waits, milliseconds"] += waited_ms

    def _reads_any(self, tensors: Iterable[torch.Tensor]) -> bool:
        changed = update_order.UpdateOrder()
        changed.add(update_order.Owner(None, after=False), tensors)
        changed.settle()
        return any(changed.positions_of(tensor) for tensor in self._tensors)


def schedule(
    original: Callable[[Any, Any], None], caller: Any, request: Any, saves: deque[Any]
) -> None:
    """Let Megatron start its process, and watch it."""
    persistent = hasattr(caller, "cur_item")
    tensors = [tensor for tensor in _tensors_of(request) if _is_host(tensor)]
    if persistent:
        _prepare_persistent(caller)
    else:
        tensors = [t for t in tensors if t.is_pinned() or t.untyped_storage().is_shared()]
    original(caller, request)
    save = ProcessSave(caller, saves, request.call_idx, tensors)
    saves.append(save)
    if settings.current().async_mode != "off":
        guard.register(save)


def is_done(
    original: Callable[..., bool], caller: Any, saves: deque[Any], blocking: bool, no_dist: bool
) -> bool:
    """As Megatron answers it, but a dead worker counts as done; its results are then missing."""
    save = saves[0] if saves else None
    if save is not None:
        if blocking:
            save.wait()
        if save.poll() and hasattr(caller, "cur_item") and caller.cur_item is None:
            caller.cur_item = save.call_idx  # Megatron polls this field
    done = original(caller, blocking, no_dist)
    if done and save is not None:
        save._end()
        saves.popleft()
    return done


def close(original: Callable[..., None], caller: Any, abort: bool) -> None:
    """Close without waiting for a dead worker."""
    if is_dead(getattr(caller, "process", None)):
        _reset(caller)
    else:
        original(caller, abort)


def end_process(caller: Any) -> None:
    """End the worker of a caller that is being collected, without waiting for an answer that a
    queue without threads never gives."""
    process = getattr(caller, "process", None)
    if process is None:
        return
    if process.is_alive():
        process.terminate()  # a worker of nvidia-resiliency-ext closes its device handles first
        process.join(timeout=5)
        if process.is_alive():
            process.kill()
    _forget_process(caller)


def queue_of(caller: Any, name: str) -> Any:
    """A queue of a persistent caller: 'queue', 'preload_q' or 'comp_q'; None before it exists.

    An attribute of the instance up to 0.16 and in nvidia-resiliency-ext, of the class from 0.17 on.
    """
    found = getattr(caller, name, None)
    return found if found is not None else getattr(caller, f"_persistent_{name}", None)


def process_of(caller: Any) -> Any:
    process = getattr(caller, "process", None)
    return process if process is not None else getattr(caller, "_persistent_process", None)


def is_dead(process: Any) -> bool:
    return process is not None and not process.is_alive()


def describe_death(process: Any) -> str:
    """One clause on how a process ended."""
    code = process.exitcode
    if code is not None and code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hint = " (the kernel's out-of-memory killer sends this one)" if code == -9 else ""
        return f"checkpoint process {process.pid} was killed by {name}{hint}"
    return f"checkpoint process {process.pid} ended with exit code {code}; its output says why"


def _prepare_persistent(caller: Any) -> None:
    """Start the worker if need be (anew, if it died), and let joins of its queues see it die."""
    if is_dead(process_of(caller)):
        logger.warning("vime_optim: %s; starting a new one", describe_death(process_of(caller)))
        _reset(caller)
    for name in ("queue", "preload_q"):
        joinable = queue_of(caller, name)
        if joinable is not None and "join" not in joinable.__dict__:
            joinable.join = functools.partial(_join_while_alive, joinable, caller)


def _reset(caller: Any) -> None:
    """Forget a dead worker and its queues, which may be locked or half written."""
    if _forget_process(caller):
        return
    if hasattr(caller, "comp_q"):
        context = torch.multiprocessing.get_context("spawn")
        caller.queue = context.JoinableQueue()
        caller.preload_q = context.JoinableQueue()
        caller.comp_q = context.Queue()


def _forget_process(caller: Any) -> bool:
    """Drop what the caller knows of its worker. True when its queues went with it."""
    cls = type(caller)
    caller.process = None
    caller.cur_item = None
    if not hasattr(cls, "_persistent_process"):
        return False
    cls._persistent_process = None
    cls._persistent_queue = cls._persistent_preload_q = cls._persistent_comp_q = None
    return True


def _join_while_alive(joinable: Any, caller: Any) -> None:
    """JoinableQueue.join, but it also returns when the worker is dead."""
    with joinable._cond:
        while not joinable._unfinished_tasks._semlock._is_zero():
            joinable._cond.wait(0.1)
            if is_dead(process_of(caller)):
                return


def _is_host(tensor: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return tensor.layout is torch.strided and tensor.device.type == "cpu"


def _tensors_of(request: Any) -> list[torch.Tensor]:
    """Every tensor that a request carries, each once."""
    found: dict[int, torch.Tensor] = {}
    stack: list[Any] = [request.async_fn, request.async_fn_args, request.preload_fn]
    stack.append(request.async_fn_kwargs)
    while stack:
        obj = stack.pop()
        if isinstance(obj, torch.Tensor):
            found[id(obj)] = obj
        elif isinstance(obj, functools.partial):
            stack += [obj.args, obj.keywords]
        elif isinstance(obj, dict):
            stack.extend(obj.values())
        elif isinstance(obj, (list, tuple)):
            stack.extend(obj)
    return list(found.values())

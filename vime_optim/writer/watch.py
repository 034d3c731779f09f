"""Follows Megatron's async callers: which save is through, and which worker is dead.

Megatron waits on queues that a dead worker never fills (F14). Here every wait looks at the process
as well, and a death becomes the failure of the saves that it leaves behind. It is raised on every
rank when the save is finalized, because all ranks meet there.

Works on the callers of megatron-core and of nvidia-resiliency-ext: both come from one root and have
the same methods; where the queues are kept differs and is asked for at run time.
"""

from __future__ import annotations

import functools
import logging
import queue
import signal
import time
from collections import deque
from typing import Any

import torch

from vime_optim import installer, settings
from vime_optim.writer.channel import ResultChannel
from vime_optim.writer.guard import InFlightSave

logger = logging.getLogger(__name__)

_POLL_S = 0.02
_SAVES = "_vime_optim_saves"


def saves_of(caller: Any) -> deque[InFlightSave]:
    """Saves handed to this caller and not finalized yet, oldest first."""
    saves: deque[InFlightSave] | None = caller.__dict__.get(_SAVES)
    if saves is None:
        saves = caller.__dict__[_SAVES] = deque()
    return saves


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
    if code is None:
        return f"writer process {process.pid} is gone"
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hint = " (the kernel's out-of-memory killer sends this one)" if code == -9 else ""
        return f"writer process {process.pid} was killed by {name}{hint}"
    if code == 0:
        return f"writer process {process.pid} ended without a result"
    return f"writer process {process.pid} ended with exit code {code}; its output says why"


# Forked writers: one process a save.


def poll_temporal(save: InFlightSave) -> None:
    process = save.process
    if process is None:
        return
    if is_dead(process):
        if process.exitcode != 0:
            save.fail(describe_death(process))
        save.mark_complete()
    else:
        _give_up_when_stuck(save)


# Persistent workers: one process for all saves of a caller.


def poll_persistent(caller: Any, save: InFlightSave) -> None:
    """Take completion messages; when the worker is dead, fail what it left."""
    dead = is_dead(save.process)  # asked first: a message sent before the death is then in the pipe
    _take_completions(caller, wait_s=0.2 if dead else 0.0)
    if dead:
        for left in saves_of(caller):
            if not left.complete and left.process is save.process:
                left.fail(describe_death(save.process))
                left.mark_complete()
    elif not save.complete and save is _first_incomplete(caller):
        _give_up_when_stuck(save)


def _first_incomplete(caller: Any) -> InFlightSave | None:
    return next((save for save in saves_of(caller) if not save.complete), None)


def _take_completions(caller: Any, wait_s: float) -> None:
    completions = queue_of(caller, "comp_q")
    while completions is not None:
        try:
            completions.get(timeout=wait_s) if wait_s else completions.get_nowait()
        except queue.Empty:
            return
        finished = _first_incomplete(caller)  # the worker does them in order
        if finished is not None:
            finished.mark_complete()


def _give_up_when_stuck(save: InFlightSave) -> None:
    """Kill a writer that lives but has made no progress for VIME_OPTIM_WRITER_TIMEOUT_S."""
    if not isinstance(save.channel, ResultChannel):
        return
    silent_s = time.monotonic() - save.started_s
    beat_s = save.channel.last_beat_s()
    if beat_s is not None:
        silent_s = min(silent_s, beat_s)
    limit_s = settings.current().writer_timeout_s
    if silent_s > limit_s:
        save.fail(
            f"writer process {save.process.pid} made no progress for {silent_s:.0f} s"
            f" (VIME_OPTIM_WRITER_TIMEOUT_S={limit_s:g}) and was killed"
        )
        save.process.kill()
        save.process.join(timeout=5)  # a process stuck in the kernel does not even die
        save.mark_complete()


def wait_until_complete(save: InFlightSave) -> None:
    while not save.poll():
        time.sleep(_POLL_S)


# Starting, and joining without hanging.


def prepare_persistent(caller: Any) -> None:
    """Start the worker if need be (anew, if it died), and let joins of its queues see it die."""
    if is_dead(process_of(caller)):
        logger.warning(
            "vime_optim: %s; starting a new one for the next save",
            describe_death(process_of(caller)),
        )
        installer.counters["writer processes that died"] += 1
        reset_persistent(caller)
    cls = type(caller)
    if caller.process is None and hasattr(cls, "_get_process"):
        caller.process = cls._get_process(torch.distributed.get_rank())
    elif caller.process is None and hasattr(cls, "_start_worker"):
        caller._start_worker(torch.distributed.get_rank())
    for name in ("queue", "preload_q"):
        joinable = queue_of(caller, name)
        if joinable is not None and "join" not in joinable.__dict__:
            joinable.join = functools.partial(_join_while_alive, joinable, caller)


def reset_persistent(caller: Any) -> None:
    """Forget a dead worker and its queues, which may be locked or half written."""
    if forget_process(caller):
        return
    context = torch.multiprocessing.get_context("spawn")
    caller.queue = context.JoinableQueue()
    caller.preload_q = context.JoinableQueue()
    caller.comp_q = context.Queue()


def forget_process(caller: Any) -> bool:
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

"""Async callers of megatron-core and nvidia-resiliency-ext: one executor behind all of them.

A request that our writer made is written by threads, whatever the caller would have started. The
caller's own questions are answered from them: which save is through, on all ranks. Requests of
other writers go to Megatron's processes, see other_writers.py.
"""

from __future__ import annotations

import queue
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from vime_optim.async_save import guard, other_writers
from vime_optim.async_save.job import SaveJob
from vime_optim.commit import task
from vime_optim.optimizer.update_order import UpdateOrder, current_order

Schedule = Callable[[Any, Any], None]
IsDone = Callable[..., bool]
_SAVES = "_vime_optim_saves"
_callers: weakref.WeakSet[Any] = weakref.WeakSet()


def saves_of(caller: Any) -> deque[Any]:
    """Saves handed to this caller and not finalized yet, oldest first."""
    saves: deque[Any] | None = caller.__dict__.get(_SAVES)
    if saves is None:
        saves = caller.__dict__[_SAVES] = deque()
        _callers.add(caller)
    return saves


def schedule(original: Schedule, caller: Any, request: Any) -> None:
    """Start a save."""
    if request.async_fn is not None and request.async_fn is not task.run:
        other_writers.schedule(original, caller, request, saves_of(caller))
        return
    job = _job_of(request)
    guard.start(job)
    saves_of(caller).append(job)


def _job_of(request: Any) -> SaveJob:
    if request.async_fn is None:  # nothing to write on this rank
        return SaveJob(0, [], queue.Queue(), UpdateOrder(), request.call_idx)
    rank, buckets, results = request.async_fn_args
    order = getattr(buckets, "order", None) or current_order()
    return SaveJob(rank, buckets, results, order, request.call_idx)


def is_done(original: IsDone, caller: Any, blocking: bool, no_dist: bool) -> bool:
    """Whether the oldest save of this caller is through on all ranks; waits when `blocking`."""
    saves = saves_of(caller)
    if not saves or not isinstance(saves[0], SaveJob):
        return other_writers.is_done(original, caller, saves, blocking, no_dist)
    job = saves[0]
    if blocking:
        job.wait()
    over = job.poll()
    done = over if no_dist else bool(caller.sync_all_async_calls(int(not over)))
    if done:
        saves.popleft()
    return done


def close(original: Callable[..., None], caller: Any, abort: bool) -> None:
    """Close a caller; with `abort` its saves end here, unfinished."""
    saves = saves_of(caller)
    if abort:
        for save in saves:
            save.abort("the save was aborted")
        saves.clear()
    other_writers.close(original, caller, abort)


def abort_calls(calls: Any) -> None:
    """A queue was closed with `abort`: callers that it had one for each save end theirs, too."""
    for call in calls.async_calls:
        for save in saves_of(call.async_caller):
            save.abort("the save was aborted")


def finish_all() -> None:
    """Before uninstall(): write every save out; Megatron's own code can then finalize it."""
    guard.finish_all()
    for caller in list(_callers):
        completions = other_writers.queue_of(caller, "comp_q")
        if getattr(caller, "process", None) is not None and completions is not None:
            for save in saves_of(caller):
                completions.put(save.call_idx)  # what Megatron waits for where a worker idles
        saves_of(caller).clear()


def discard(caller: Any) -> None:
    """The caller is being collected: nothing of it can be finalized any more."""
    for save in saves_of(caller):
        save.abort("the caller that the save was handed to is gone")
    saves_of(caller).clear()
    other_writers.end_process(caller)

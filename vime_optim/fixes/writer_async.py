"""Async saves are exact at the moment asked for, and cost the training nothing.

Symptom: an async save holds values of later steps (F19) or, once storages moved, old ones (F13); a
writer that dies leaves the job waiting for ever (F14); an async save costs more than a sync one.
Cause: host tensors are handed to another process by reference, or copied for it; waits look at
queues, not at processes.
Changes: async saves are written by threads of this process, from the live memory (async_save/);
what changes that memory asks first.
Leaves alone: multi-storage-client paths, writers with stream extensions and local checkpoints;
those keep their processes, under the guard.
Remove when: upstream hands persistent workers copies, and watches its workers.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from vime_optim.fixes.places import (
    DISTRIBUTED_OPTIMIZER,
    FLOAT16_OPTIMIZER,
    FP32_OPTIMIZER,
    MEGATRON_OPTIMIZER,
    MIXED_PRECISION_OPTIMIZER,
    NVRX,
    STRATEGIES,
    in_load,
)
from vime_optim.probe import missing_parameters, missing_words, parameters_of
from vime_optim.registry import NEEDED, Diagnosis, Fix, Hit, left_to_others, not_understood

_MEGATRON, _NVRX = f"{STRATEGIES}.async_utils", f"{NVRX}.core"


FIX = Fix(
    id="writer-async",
    faults=("F13", "F14", "F19"),
    summary="async saves are exact at the moment asked for, and a dead writer raises",
    targets=(in_load("checkpoint_dir"),),
    after=("stub", "gather-free"),
)


def _both(method: str) -> tuple[str, str]:
    """Of the callers of either kind."""
    return f"TemporalAsyncCaller.{method}", f"PersistentAsyncCaller.{method}"


def _diagnose_caller(module: ModuleType, original: Any) -> Diagnosis:
    reason = missing_parameters(original, "async_req")
    reason = reason or missing_words(original, "preload_fn", "async_fn")
    return not_understood(reason) if reason else NEEDED


@FIX.wraps(_MEGATRON, _both("schedule_async_call"), _diagnose_caller)
@FIX.wraps(_NVRX, _both("schedule_async_call"), _diagnose_caller, optional=True)
def _schedule(original: Any, hit: Hit, self: Any, async_req: Any) -> None:
    from vime_optim.async_save import callers

    hit()
    callers.schedule(original, self, async_req)


@FIX.wraps(_MEGATRON, _both("is_current_async_call_done"))
@FIX.wraps(_NVRX, _both("is_current_async_call_done"), optional=True)
def _is_done(
    original: Any, hit: Hit, self: Any, blocking: bool = False, no_dist: bool = False
) -> bool:
    from vime_optim.async_save import callers

    return callers.is_done(original, self, blocking, no_dist)


@FIX.wraps(_MEGATRON, _both("close"))
@FIX.wraps(_NVRX, _both("close"), optional=True)
def _close(original: Any, hit: Hit, self: Any, abort: bool = False) -> None:
    from vime_optim.async_save import callers

    def stock(caller: Any, abort: bool) -> None:
        original(caller, abort) if "abort" in parameters_of(original) else original(caller)

    callers.close(stock, self, abort)


@FIX.wraps(_MEGATRON, "AsyncCallsQueue.close", optional=True)
@FIX.wraps(_NVRX, "AsyncCallsQueue.close", optional=True)
def _close_queue(original: Any, hit: Hit, self: Any, *args: Any, **kwargs: Any) -> Any:
    from vime_optim.async_save import callers

    if kwargs.get("abort", args[0] if args else False):
        callers.abort_calls(self)
    return original(self, *args, **kwargs)


@FIX.wraps(_MEGATRON, "PersistentAsyncCaller.__del__")
@FIX.wraps(_NVRX, "PersistentAsyncCaller.__del__", optional=True)
def _del(original: Any, hit: Hit, self: Any) -> None:
    if sys.is_finalizing():
        return  # idle workers end with their parent, threads have been stopped
    from vime_optim.async_save import callers

    callers.discard(self)


# Where saved memory changes.


@FIX.wraps(DISTRIBUTED_OPTIMIZER, "step_with_ready_grads", optional=True)
@FIX.wraps(MIXED_PRECISION_OPTIMIZER, "step_with_ready_grads", optional=True)
@FIX.wraps(FP32_OPTIMIZER, "step_with_ready_grads", optional=True)
def _step(original: Any, hit: Hit, self: Any, *args: Any, **kwargs: Any) -> Any:
    from vime_optim.async_save import guard

    guard.before_megatron_step(self)
    return original(self, *args, **kwargs)


@FIX.wraps(DISTRIBUTED_OPTIMIZER, ("load_state_dict", "load_parameter_state"), optional=True)
@FIX.wraps(FLOAT16_OPTIMIZER, "load_state_dict", optional=True)
@FIX.wraps(FP32_OPTIMIZER, "load_state_dict", optional=True)
@FIX.wraps(MIXED_PRECISION_OPTIMIZER, "reload_model_params", optional=True)
@FIX.wraps(MEGATRON_OPTIMIZER, ("offload_to_cpu", "restore_from_cpu"), optional=True)
# What somebody else wrapped of torch is left alone: the guard is finer with these, not less safe.
@FIX.wraps("torch.nn.modules.module:Module", "load_state_dict", left_to_others())
def _change(original: Any, hit: Hit, *args: Any, **kwargs: Any) -> Any:
    from vime_optim.async_save import guard

    guard.before_change()
    return original(*args, **kwargs)


def hold_saves() -> None:
    """Before a load: DCP reads into the very tensors that a save may be writing."""
    from vime_optim.async_save import guard

    guard.before_change()


@FIX.wraps("torch.storage:UntypedStorage", "resize_", left_to_others())
def _resize(original: Any, hit: Hit, self: Any, *args: Any, **kwargs: Any) -> Any:
    guard = sys.modules.get("vime_optim.async_save.guard")
    if guard is not None:
        guard.before_change_of(self)
    return original(self, *args, **kwargs)


@FIX.wraps(f"{NVRX}.filesystem_async:FileSystemWriterAsync", "__init__", optional=True)
def _no_cached_handles(original: Any, hit: Hit, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    if getattr(self, "use_cached_data_structure", False):
        # The worker would keep handles to tensors for later saves. They are told apart by
        # address, and an address that was freed and given out again is another memory (F13).
        hit()
        self.use_cached_data_structure = False

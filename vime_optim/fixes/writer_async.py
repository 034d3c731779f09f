"""Async saves are exact at the moment asked for, and cost the training nothing.

Symptom: an async save with a persistent worker holds values of later steps (F19) or, once storages
moved, old ones (F13); a writer that dies leaves the job waiting for ever (F14). An async save costs
the training more than a sync one.
Cause: host tensors are handed to another process by reference, or copied for it; waits look at
queues, not at processes.
Changes: async saves are written by threads of this process, from the live memory (async_save/);
what changes that memory asks first.
Leaves alone: multi-storage-client paths, writers with stream extensions and local checkpoints;
those keep their processes, under the guard.
Remove when: upstream hands persistent workers copies, and watches its workers.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

from vime_optim.fixes.places import DISTRIBUTED, LOAD, NVRX, OPTIMIZER, SERIALIZATION, STRATEGIES
from vime_optim.probe import (
    describe_foreign_layer,
    missing_parameters,
    parameters_of,
    source_of,
)
from vime_optim.registry import (
    NEEDED,
    Diagnosis,
    Fix,
    Hit,
    Target,
    Wrap,
    fixed_upstream,
    not_understood,
    takes,
)

# Callers.


def _wrap_schedule(original: Any, hit: Hit) -> Any:
    def schedule_async_call(self: Any, async_req: Any) -> None:
        from vime_optim.async_save import callers

        hit()
        callers.schedule(original, self, async_req)

    return schedule_async_call


def _wrap_is_done(original: Any, hit: Hit) -> Any:
    def is_current_async_call_done(
        self: Any, blocking: bool = False, no_dist: bool = False
    ) -> bool:
        from vime_optim.async_save import callers

        return callers.is_done(original, self, blocking, no_dist)

    return is_current_async_call_done


def _wrap_close(original: Any, hit: Hit) -> Any:
    takes_abort = "abort" in parameters_of(original)

    def close(self: Any, abort: bool = False) -> None:
        from vime_optim.async_save import callers

        def stock(caller: Any, abort: bool) -> None:
            original(caller, abort) if takes_abort else original(caller)

        callers.close(stock, self, abort)

    return close


def _wrap_queue_close(original: Any, hit: Hit) -> Any:
    @functools.wraps(original)
    def close(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vime_optim.async_save import callers

        if kwargs.get("abort", args[0] if args else False):
            callers.abort_calls(self)
        return original(self, *args, **kwargs)

    return close


def _wrap_del(original: Any, hit: Hit) -> Any:
    def __del__(self: Any) -> None:
        if sys.is_finalizing():
            return  # idle workers end with their parent, threads have been stopped
        from vime_optim.async_save import callers

        callers.discard(self)

    return __del__


# Where saved memory changes.


def _wrap_step(original: Any, hit: Hit) -> Any:
    @functools.wraps(original)
    def step_with_ready_grads(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vime_optim.async_save import guard

        guard.before_megatron_step(self)
        return original(self, *args, **kwargs)

    return step_with_ready_grads


def _wrap_change(original: Any, hit: Hit) -> Any:
    @functools.wraps(original)
    def change(*args: Any, **kwargs: Any) -> Any:
        from vime_optim.async_save import guard

        guard.before_change()
        return original(*args, **kwargs)

    return change


def hold_saves() -> None:
    """Before a load: DCP reads into the very tensors that a save may be writing."""
    from vime_optim.async_save import guard

    guard.before_change()


def _wrap_resize(original: Any, hit: Hit) -> Any:
    def resize_(self: Any, *args: Any, **kwargs: Any) -> Any:
        guard = sys.modules.get("vime_optim.async_save.guard")
        if guard is not None:
            guard.before_change_of(self)
        return original(self, *args, **kwargs)

    return resize_


def _diagnose_caller(module: ModuleType, original: Any) -> Diagnosis:
    reason = missing_parameters(original, "async_req")
    if reason:
        return not_understood(reason)
    source = source_of(original)
    if "preload_fn" not in source or "async_fn" not in source:
        return not_understood("does not stage by preload_fn and write by async_fn")
    return NEEDED


def _caller_targets(module: str, optional: bool) -> tuple[Target, ...]:
    def target(name: str, wrap: Wrap, **kwargs: Any) -> Target:
        return Target(module, name, wrap, optional=optional, **kwargs)

    return (
        *(
            target(f"{caller}.{name}", wrap, **kwargs)
            for caller in ("TemporalAsyncCaller", "PersistentAsyncCaller")
            for name, wrap, kwargs in (
                ("schedule_async_call", _wrap_schedule, {"diagnose": _diagnose_caller}),
                ("is_current_async_call_done", _wrap_is_done, {}),
                ("close", _wrap_close, {}),
            )
        ),
        target("PersistentAsyncCaller.__del__", _wrap_del),
        Target(module, "AsyncCallsQueue.close", _wrap_queue_close, optional=True),
    )


def _update_targets() -> tuple[Target, ...]:
    steps = [
        Target(module, f"{cls}.step_with_ready_grads", _wrap_step, optional=True)
        for module, cls in (
            (DISTRIBUTED, "DistributedOptimizer"),
            (OPTIMIZER, "MixedPrecisionOptimizer"),
            (OPTIMIZER, "FP32Optimizer"),
        )
    ]
    rest = [
        Target(module, name, _wrap_change, optional=True)
        for module, name in (
            (DISTRIBUTED, "DistributedOptimizer.load_state_dict"),
            (DISTRIBUTED, "DistributedOptimizer.load_parameter_state"),
            (OPTIMIZER, "Float16OptimizerWithFloat16Params.load_state_dict"),
            (OPTIMIZER, "FP32Optimizer.load_state_dict"),
            (OPTIMIZER, "MixedPrecisionOptimizer.reload_model_params"),
            (OPTIMIZER, "MegatronOptimizer.offload_to_cpu"),
            (OPTIMIZER, "MegatronOptimizer.restore_from_cpu"),
        )
    ]
    torch_own = [
        Target("torch.nn.modules.module", "Module.load_state_dict", _wrap_change, _diagnose_torch),
        Target("torch.storage", "UntypedStorage.resize_", _wrap_resize, _diagnose_torch),
    ]
    return (*steps, *rest, *torch_own)


def _diagnose_torch(module: ModuleType, original: Any) -> Diagnosis:
    """What somebody else wrapped is left alone: the guard is finer with these, not less safe."""
    foreign = describe_foreign_layer(original, module)
    return fixed_upstream(f"left to {foreign}") if foreign else NEEDED


def _wrap_no_cached_handles(original: Any, hit: Hit) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if getattr(self, "use_cached_data_structure", False):
            # The worker would keep handles to tensors for later saves. They are told apart by
            # address, and an address that was freed and given out again is another memory (F13).
            hit()
            self.use_cached_data_structure = False

    return __init__


FIX = Fix(
    id="writer-async",
    faults=("F13", "F14", "F19"),
    summary="async saves are exact at the moment asked for, and a dead writer raises",
    targets=(
        *_caller_targets(f"{STRATEGIES}.async_utils", optional=False),
        *_caller_targets(f"{NVRX}.core", optional=True),
        Target(
            f"{NVRX}.filesystem_async",
            "FileSystemWriterAsync.__init__",
            _wrap_no_cached_handles,
            optional=True,
        ),
        *_update_targets(),
        Target(SERIALIZATION, "load", LOAD, takes("checkpoint_dir")),
    ),
    after=("stub", "gather-free"),
)

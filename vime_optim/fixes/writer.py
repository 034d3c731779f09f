"""Saves are exact, whole or refused, and never hang.

Symptom: an async save with a persistent worker holds values of later steps (F19) or, once storages
moved, old ones (F13); a writer that dies leaves the job waiting for ever (F14); a directory that is
half one save and half another loads. An async save costs the training more than a sync one.
Cause: host tensors are handed to another process by reference, or copied for it; waits look at
queues, not at processes; a failure on one rank is raised there alone; an overwritten directory
keeps the old `metadata.json`.
Changes: async saves are written by threads of this process, from the live memory (async_save/);
what changes that memory asks first. Files are written by our writer, which digests on the way
(writer/task, fastfile); `save` and `load` agree across ranks (writer/commit, loadcheck).
Leaves alone: planning, `.metadata`, multi-storage-client paths, writers with stream extensions and
local checkpoints; those keep their processes, under the guard.
Remove when: upstream hands persistent workers copies, watches its workers, and refuses directories
that are not whole.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

from vime_optim.fixes.save_load import commit_targets
from vime_optim.probe import (
    describe_foreign_layer,
    missing_parameters,
    missing_words,
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
)

_STRATEGIES = "megatron.core.dist_checkpointing.strategies"
_NVRX = "nvidia_resiliency_ext.checkpointing.async_ckpt"
_OPTIMIZER = "megatron.core.optimizer.optimizer"
_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer"


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
            (_DISTRIBUTED, "DistributedOptimizer"),
            (_OPTIMIZER, "MixedPrecisionOptimizer"),
            (_OPTIMIZER, "FP32Optimizer"),
        )
    ]
    rest = [
        Target(module, name, _wrap_change, optional=True)
        for module, name in (
            (_DISTRIBUTED, "DistributedOptimizer.load_state_dict"),
            (_DISTRIBUTED, "DistributedOptimizer.load_parameter_state"),
            (_OPTIMIZER, "Float16OptimizerWithFloat16Params.load_state_dict"),
            (_OPTIMIZER, "FP32Optimizer.load_state_dict"),
            (_OPTIMIZER, "MixedPrecisionOptimizer.reload_model_params"),
            (_OPTIMIZER, "MegatronOptimizer.offload_to_cpu"),
            (_OPTIMIZER, "MegatronOptimizer.restore_from_cpu"),
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


# Writers: files, digests and results.


def _wrap_get_save_function(original: Any, hit: Hit) -> Any:
    def get_save_function_and_args(self: Any) -> Any:
        from vime_optim.commit import file_plan

        ours = file_plan.save_function_and_args(self)
        if ours is None:
            return original(self)
        hit()
        return ours

    return get_save_function_and_args


def _wrap_execute_sync(original: Any, hit: Hit) -> Any:
    @functools.wraps(original)
    def execute_sync(self: Any) -> None:
        from vime_optim.commit import agreement

        hit()
        agreement.point()  # all have planned, and none writes when one could not
        original(self)

    return execute_sync


def _wrap_prepare(original: Any, hit: Hit) -> Any:
    def prepare_write_data(self: Any, plan: Any, planner: Any) -> None:
        if not _writes_plain_files(self):
            original(self, plan, planner)
            return
        from vime_optim.commit import file_plan

        hit()
        file_plan.prepare_write_data(sys.modules[original.__module__], self, plan, planner)

    return prepare_write_data


def _diagnose_prepare(module: ModuleType, original: Any) -> Diagnosis:
    reason = missing_parameters(original, "plan", "planner")
    reason = reason or missing_words(original, "results_queue")
    if reason:
        return not_understood(reason)
    if not hasattr(module, "_split_by_separation_hint"):
        return not_understood("its module does not separate items by a hint")
    return NEEDED


def _writes_plain_files(writer: Any) -> bool:
    """Not through the multi-storage client, and without extensions that transform the stream.
    VIME_OPTIM_ASYNC=off leaves every file to Megatron."""
    from vime_optim import settings

    if getattr(writer, "use_msc", False) or settings.current().async_mode == "off":
        return False
    if getattr(writer, "open_file", open) is not open:  # nvidia-resiliency-ext
        return False
    if not _callers_are_ours():
        return False
    return not getattr(getattr(writer, "transforms", None), "extensions", None)


def _callers_are_ours() -> bool:
    """Whether an async save gets to our threads (not with VIME_OPTIM_SKIP=writer-async)."""
    for name in (f"{_STRATEGIES}.async_utils", f"{_NVRX}.core"):
        caller = getattr(sys.modules.get(name), "TemporalAsyncCaller", None)
        if caller and not hasattr(caller.schedule_async_call, "__vime_optim__"):
            return False
    return True


def _wrap_no_cached_handles(original: Any, hit: Hit) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if getattr(self, "use_cached_data_structure", False):
            # The worker would keep handles to tensors for later saves. They are told apart by
            # address, and an address that was freed and given out again is another memory (F13).
            hit()
            self.use_cached_data_structure = False

    return __init__


def _wrap_finish(original: Any, hit: Hit) -> Any:
    def finish(self: Any, metadata: Any, results: Any) -> None:
        from vime_optim.commit import sessions
        from vime_optim.files.manifest import MANIFEST_MARK

        plain = _writes_plain_files(self)
        session = sessions.session_of(self.checkpoint_dir) if plain else None
        if session is not None:
            session.take_away_marks()  # of a save that ended here since this one began
        recorded = plain and sessions.is_recorded(results)
        if recorded:
            setattr(metadata, MANIFEST_MARK, True)
        else:
            vars(metadata).pop(MANIFEST_MARK, None)  # metadata may be that of an earlier save
        original(self, metadata, results)
        if session is not None:
            session.written.add(".metadata")
        if recorded and (session is None or session.error is None):
            hit()
            sessions.write_manifest(str(self.checkpoint_dir), results)

    return finish


def _wrap_finalize(original: Any, hit: Hit) -> Any:
    def save_state_dict_async_finalize(
        storage_writer: Any, global_metadata: Any, dist_wrapper: Any
    ) -> None:
        from vime_optim.commit import sessions

        hit()
        sessions.finalize(original, storage_writer, global_metadata, dist_wrapper)

    return save_state_dict_async_finalize


def _writer_targets(package: str, requests: str, optional: bool) -> tuple[Target, ...]:
    module = f"{package}.filesystem_async"
    writer = "FileSystemWriterAsync"
    return (
        Target(
            f"{package}.{requests}",
            "AsyncRequest.execute_sync",
            _wrap_execute_sync,
            optional=optional,
        ),
        Target(
            module,
            f"{writer}.prepare_write_data",
            _wrap_prepare,
            diagnose=_diagnose_prepare,
            optional=optional,
        ),
        Target(
            module,
            f"{writer}.get_save_function_and_args",
            _wrap_get_save_function,
            optional=optional,
        ),
        Target(module, f"{writer}.finish", _wrap_finish, optional=optional),
    )


FIXES: tuple[Fix, ...] = (
    Fix(
        id="writer-async",
        faults=("F13", "F14", "F19"),
        summary="async saves are exact at the moment asked for, and a dead writer raises",
        targets=(
            *_caller_targets(f"{_STRATEGIES}.async_utils", optional=False),
            *_caller_targets(f"{_NVRX}.core", optional=True),
            Target(
                f"{_NVRX}.filesystem_async",
                "FileSystemWriterAsync.__init__",
                _wrap_no_cached_handles,
                optional=True,
            ),
            *_update_targets(),
        ),
    ),
    Fix(
        id="writer-files",
        faults=("F14",),
        summary="files written in one pass with digests, without copies",
        targets=(
            *_writer_targets(_STRATEGIES, "async_utils", optional=False),
            *_writer_targets(_NVRX, "core", optional=True),
        ),
    ),
    Fix(
        id="writer-commit",
        faults=("F14",),
        summary="a save is complete on all ranks or raises on all; a load is whole or refused",
        targets=(
            *commit_targets(),
            Target(
                f"{_STRATEGIES}.state_dict_saver", "save_state_dict_async_finalize", _wrap_finalize
            ),
            Target(
                f"{_NVRX}.state_dict_saver",
                "save_state_dict_async_finalize",
                _wrap_finalize,
                optional=True,
            ),
        ),
    ),
)

"""Saves are exact, whole or refused, and never hang.

Symptom: an async save with a persistent worker holds values of later steps (F19) or, once storages
moved, old ones (F13); a writer that dies leaves the job waiting for ever (F14); a directory that is
half one save and half another loads.
Cause: host tensors are handed over by reference; waits look at queues, not at processes; a failure
on one rank is raised there alone; an overwritten directory keeps the old `metadata.json`.
Changes: the async callers of megatron-core and nvidia-resiliency-ext register what a worker reads
and watch it (writer/guard, stage, watch, dispatch); files are written by our writer, which never
raises in the worker and digests on the way (writer/task, fastfile); `save` and `load` agree across
ranks (writer/commit, loadcheck).
Leaves alone: planning, `.metadata`, multi-storage-client paths, writers with stream
extensions, local checkpoints.
Remove when: upstream hands persistent workers copies, watches its workers, and refuses directories
that are not whole.
"""

from __future__ import annotations

import functools
import os
import sys
from types import ModuleType
from typing import Any

from vime_optim.probe import missing_parameters, source_of
from vime_optim.registry import NEEDED, Diagnosis, Fix, Hit, Target, Wrap, not_understood
from vime_optim.writer.entrypoints import commit_targets

_STRATEGIES = "megatron.core.dist_checkpointing.strategies"
_NVRX = "nvidia_resiliency_ext.checkpointing.async_ckpt"
_OPTIMIZER = "megatron.core.optimizer.optimizer"
_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer"


# Callers: guard, stage and watch.


def _wrap_schedule(kind: str) -> Wrap:
    def wrap(original: Any, hit: Hit) -> Any:
        def schedule_async_call(self: Any, async_req: Any) -> None:
            from vime_optim.writer import dispatch

            hit()
            getattr(dispatch, f"schedule_{kind}")(original, self, async_req)

        return schedule_async_call

    return wrap


def _wrap_is_done(original: Any, hit: Hit) -> Any:
    def is_current_async_call_done(
        self: Any, blocking: bool = False, no_dist: bool = False
    ) -> bool:
        from vime_optim.writer import dispatch

        return dispatch.is_done(original, self, blocking, no_dist)

    return is_current_async_call_done


def _wrap_close(original: Any, hit: Hit) -> Any:
    def close(self: Any, abort: bool = False) -> None:
        from vime_optim.writer import dispatch

        dispatch.close_persistent(original, self, abort)

    return close


def _wrap_del(original: Any, hit: Hit) -> Any:
    def __del__(self: Any) -> None:
        if sys.is_finalizing():
            return  # the worker notices that its trainer is gone
        from vime_optim.writer import dispatch

        dispatch.discard_persistent(self)

    return __del__


def _wrap_update(everything: bool) -> Wrap:
    """Wait before a method that changes optimizer state in place.

    Args:
        everything: wait for any save by reference; else only for one that holds this optimizer's
            storages.
    """

    def wrap(original: Any, hit: Hit) -> Any:
        @functools.wraps(original)
        def update(self: Any, *args: Any, **kwargs: Any) -> Any:
            from vime_optim.writer import guard

            if guard.in_flight():
                guard.before_update(None if everything else guard.optimizer_tensors(self))
            return original(self, *args, **kwargs)

        return update

    return wrap


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

    temporal, persistent = "TemporalAsyncCaller", "PersistentAsyncCaller"
    schedule, done = "schedule_async_call", "is_current_async_call_done"
    return (
        target(f"{temporal}.{schedule}", _wrap_schedule("temporal"), diagnose=_diagnose_caller),
        target(f"{persistent}.{schedule}", _wrap_schedule("persistent"), diagnose=_diagnose_caller),
        target(f"{temporal}.{done}", _wrap_is_done),
        target(f"{persistent}.{done}", _wrap_is_done),
        target(f"{persistent}.close", _wrap_close),
        target(f"{persistent}.__del__", _wrap_del),
    )


def _update_targets() -> tuple[Target, ...]:
    steps = [
        Target(module, f"{cls}.step_with_ready_grads", _wrap_update(False), optional=True)
        for module, cls in (
            (_DISTRIBUTED, "DistributedOptimizer"),
            (_OPTIMIZER, "MixedPrecisionOptimizer"),
            (_OPTIMIZER, "FP32Optimizer"),
        )
    ]
    rest = [
        Target(module, name, _wrap_update(True), optional=True)
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
    return (*steps, *rest)


# Writers: files, digests and results.


def _wrap_get_save_function(original: Any, hit: Hit) -> Any:
    def get_save_function_and_args(self: Any) -> Any:
        save_fn, preload_fn, arguments = original(self)
        if save_fn is None or not _writes_plain_files(self):
            return save_fn, preload_fn, arguments
        from vime_optim.writer import task

        hit()
        pid = os.getpid()
        staged = functools.partial(task.preload, pid, preload_fn)
        return functools.partial(task.run, pid), staged, arguments

    return get_save_function_and_args


def _wrap_execute_sync(original: Any, hit: Hit) -> Any:
    @functools.wraps(original)
    def execute_sync(self: Any) -> None:
        from vime_optim.writer import agreement, task

        hit()
        agreement.point()  # all have planned, and none writes when one could not
        with task.written_here():
            original(self)

    return execute_sync


def _diagnose_get_save_function(module: ModuleType, original: Any) -> Diagnosis:
    source = source_of(original)
    for needed in ("preload_tensors", "results_queue", "write_preloaded_data_multi"):
        if needed not in source:
            return not_understood(f"{needed} is not in its source")
    return NEEDED


def _wrap_prepare(original: Any, hit: Hit) -> Any:
    def prepare_write_data(self: Any, plan: Any, planner: Any) -> None:
        if not _writes_plain_files(self):
            original(self, plan, planner)
            return
        from vime_optim.writer import buckets

        hit()
        buckets.prepare_write_data(sys.modules[original.__module__], self, plan, planner)

    return prepare_write_data


def _wrap_names(original: Any, hit: Hit) -> Any:
    """Own names for the files of a writer whose buckets are its own business."""

    def prepare_write_data(self: Any, plan: Any, planner: Any) -> None:
        from vime_optim.writer import buckets

        original(self, buckets.with_own_names(plan) if _writes_plain_files(self) else plan, planner)

    return prepare_write_data


def _diagnose_prepare(module: ModuleType, original: Any) -> Diagnosis:
    reason = missing_parameters(original, "plan", "planner")
    if reason:
        return not_understood(reason)
    source = source_of(original)
    for needed in ("_split_by_size_and_type", "_split_by_separation_hint", "write_buckets"):
        if needed not in source:
            return not_understood(f"{needed} is not in its source")
    return NEEDED


def _writes_plain_files(writer: Any) -> bool:
    """Not through the multi-storage client, and without extensions that transform the stream."""
    if getattr(writer, "use_msc", False):
        return False
    return not getattr(getattr(writer, "transforms", None), "extensions", None)


def _wrap_no_cached_handles(original: Any, hit: Hit) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if getattr(self, "use_cached_data_structure", False):
            # The worker would keep handles to tensors for later saves. They are told apart by
            # address, and an address that was freed and given out again is another memory (F13).
            hit()
            self.use_cached_data_structure = False

    return __init__


def _wrap_results_queue(original: Any, hit: Hit) -> Any:
    def get_write_results_queue(*args: Any, **kwargs: Any) -> Any:
        from vime_optim.writer.channel import ResultChannel

        return ResultChannel()

    return get_write_results_queue


def _wrap_finish(original: Any, hit: Hit) -> Any:
    def finish(self: Any, metadata: Any, results: Any) -> None:
        from vime_optim.writer import commit
        from vime_optim.writer.manifest import MANIFEST_MARK

        plain = _writes_plain_files(self)
        session = commit.session_of(self.checkpoint_dir) if plain else None
        if session is not None:
            session.take_away_marks()  # of a save that ended here since this one began
        recorded = plain and commit.is_recorded(results)
        if recorded:
            setattr(metadata, MANIFEST_MARK, True)
        else:
            vars(metadata).pop(MANIFEST_MARK, None)  # metadata may be that of an earlier save
        original(self, metadata, results)
        if session is not None:
            session.written.add(".metadata")
        if recorded and (session is None or session.error is None):
            hit()
            commit.write_manifest(str(self.checkpoint_dir), results)

    return finish


def _wrap_finalize(original: Any, hit: Hit) -> Any:
    def save_state_dict_async_finalize(
        storage_writer: Any, global_metadata: Any, dist_wrapper: Any
    ) -> None:
        from vime_optim.writer import commit

        hit()
        commit.finalize(original, storage_writer, global_metadata, dist_wrapper)

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
            f"{writer}.get_save_function_and_args",
            _wrap_get_save_function,
            diagnose=_diagnose_get_save_function,
            optional=optional,
        ),
        Target(module, f"{writer}.finish", _wrap_finish, optional=optional),
        # Private up to 0.16.
        Target(module, "get_write_results_queue", _wrap_results_queue, optional=True),
        Target(module, "_get_write_results_queue", _wrap_results_queue, optional=True),
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
        summary="files written in one pass with digests; the worker reports, it does not die",
        targets=(
            *_writer_targets(_STRATEGIES, "async_utils", optional=False),
            Target(
                f"{_STRATEGIES}.filesystem_async",
                "FileSystemWriterAsync.prepare_write_data",
                _wrap_prepare,
                diagnose=_diagnose_prepare,
            ),
            *_writer_targets(_NVRX, "core", optional=True),
            Target(
                f"{_NVRX}.filesystem_async",
                "FileSystemWriterAsync.prepare_write_data",
                _wrap_names,
                optional=True,
            ),
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

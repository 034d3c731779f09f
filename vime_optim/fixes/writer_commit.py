"""A save is complete on all ranks or raises on all; a load is whole or refused.

Symptom: a failure on one rank is raised there alone, and the others wait for ever (F14); a
directory that is half one save and half another loads.
Cause: ranks agree on nothing but what their collectives happen to; an overwritten directory keeps
the old `metadata.json`.
Changes: `save` and `load` are one operation of all ranks (commit/agreement); a checkpoint is
complete only when all is written (commit/sessions), and is looked at before a load
(commit/load_check).
Leaves alone: multi-storage-client paths; loads without validation, which a rank may do alone.
Remove when: upstream refuses directories that are not whole, and fails on all ranks or none.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

from vime_optim.commit import agreement, load_check, sessions
from vime_optim.errors import CheckpointError, WriterError
from vime_optim.files.checked import noting
from vime_optim.fixes.places import LOAD, NVRX, SAVE, STRATEGIES
from vime_optim.probe import missing_parameters, source_of
from vime_optim.registry import (
    NEEDED,
    Call,
    Diagnosis,
    Fix,
    Hit,
    Target,
    Wrap,
    fixed_upstream,
    not_understood,
)

_NOT_SAVED = "the checkpoint was not saved, as a rank failed"
_NOT_LOADED = "the checkpoint was not loaded, as a rank failed"
_LOAD_AGAIN = "the model may be half loaded: load this or an older checkpoint before going on"


def is_remote(call: Call) -> bool:
    """Paths of the multi-storage client are left to Megatron."""
    return str(call["checkpoint_dir"]).startswith("msc://")


def one_save(call: Call) -> AbstractContextManager[None]:
    """All ranks leave this block by an exception, or none does."""
    operation = agreement.Operation(_NOT_SAVED, str(call["checkpoint_dir"]), WriterError)
    return agreement.together(operation)


@contextmanager
def session(call: Call, hit: Hit) -> Iterator[sessions.SaveSession]:
    """Collective: the directory is locked, and freed of what was in it, until the commit."""
    hit()
    agreement.point()  # all came so far: only now is an older save taken away
    opened = sessions.open_session(str(call["checkpoint_dir"]))
    try:
        with sessions.belonging_to(opened):
            yield opened
    except BaseException:
        opened.release()
        raise


def commit(session: sessions.SaveSession, request: Any) -> None:
    """Collective: all ranks have saved; an async save commits when it is finalized."""
    if request is None:
        session.finish()
    else:
        sessions.finalized_by(session, request)
        agreement.point()


def operation_of_load(call: Call) -> agreement.Operation | None:
    """None for a load that a rank may do alone: without validation Megatron's has no collective."""
    everybody = bool(call.get("validate_access_integrity", True))
    if call.get("process_group") is not None or not everybody:
        return None
    directory = str(call["checkpoint_dir"])
    return agreement.Operation(_NOT_LOADED, directory, CheckpointError, _LOAD_AGAIN)


@contextmanager
def one_load(call: Call, operation: agreement.Operation | None) -> Iterator[None]:
    """All ranks leave this block by an exception, or none does; torch's become ours, and ours are
    what callers of Megatron's load catch."""
    with load_check.that_callers_catch(), agreement.together(operation):
        with load_check.errors_of_ours(str(call["checkpoint_dir"])):
            yield
        agreement.point()


@contextmanager
def whole_or_refused(call: Call, operation: agreement.Operation | None, hit: Hit) -> Iterator[None]:
    """Before anything is read, refuse what is not whole; compare what is read with its digests.

    Raises:
        CheckpointError: on every rank.
    """
    hit()
    directory = str(call["checkpoint_dir"])
    comparison = load_check.check_before_load(directory, collective=operation is not None)
    with noting(comparison.chunks):
        yield
    comparison.finish()


def _wrap_collective(original: Any, hit: Hit) -> Any:
    """A function of Megatron that begins with a collective: not entered when a rank has failed."""

    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        agreement.point()
        return original(*args, **kwargs)

    return collective


def _wrap_template(original: Any, hit: Hit) -> Any:
    """Turns a template into what torch reads into, which up to 0.18 all ranks do together."""

    @functools.wraps(original)
    def mcore_to_pyt_state_dict(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        if kwargs.get("is_loading", args[1] if len(args) > 1 else False):
            agreement.point()
        return made

    return mcore_to_pyt_state_dict


def _diagnose_reading(alone: bool, *needed: str) -> Callable[[ModuleType, Any], Diagnosis]:
    """Needed where each rank plans and reads by itself (0.19 on), or where all do it together."""

    def diagnose(module: ModuleType, original: Any) -> Diagnosis:
        reason = missing_parameters(original, *needed)
        if reason:
            return not_understood(reason)
        if alone != ("no_dist=True" in source_of(module.TorchDistLoadShardedStrategy.load)):
            return fixed_upstream(
                "of no use where ranks read " + ("together" if alone else "alone")
            )
        return NEEDED

    return diagnose


def _wrap_rank0_step(name: str) -> Wrap:
    """A step that rank 0 takes alone: its failure is raised later, by all."""

    def wrap(original: Any, hit: Hit) -> Any:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            directory = str(signature.bind(*args, **kwargs).arguments["checkpoint_dir"])
            session = sessions.session_of(directory)
            if session is None:
                return original(*args, **kwargs)
            return sessions.rank0_step(session, name, functools.partial(original, *args, **kwargs))

        return step

    return wrap


def _diagnose_directory(module: ModuleType, original: Any) -> Diagnosis:
    reason = missing_parameters(original, "checkpoint_dir")
    return not_understood(reason) if reason else NEEDED


def commit_targets() -> tuple[Target, ...]:
    """Targets of the fix `writer-commit` in megatron.core.dist_checkpointing."""
    package = "megatron.core.dist_checkpointing"

    def target(module: str, name: str, wrap: Wrap | str, optional: bool = False) -> Target:
        return Target(
            f"{package}.{module}", name, wrap, diagnose=_diagnose_directory, optional=optional
        )

    common = "strategies.common"
    return (
        target("serialization", "save", SAVE),
        target("serialization", "load", LOAD),
        target("core", "save_config", _wrap_rank0_step("metadata.json")),
        # A method up to 0.16, a function in 0.17 and 0.18, part of the sharded state from 0.19 on.
        target(common, "TorchCommonSaveStrategy.save_common", _wrap_rank0_step("common.pt"), True),
        target(common, "save_common", _wrap_rank0_step("common.pt"), True),
        target("validation", "save_integrity_manifest", _wrap_rank0_step("integrity.json"), True),
        *_collective_targets(package),
    )


def _collective_targets(package: str) -> tuple[Target, ...]:
    """Where Megatron's ranks wait for one another in the course of a save or a load."""
    collectives = (
        ("validation", "determine_global_metadata"),
        ("exchange_utils", "determine_main_replica_uniform_distribution"),
        ("exchange_utils", "exchange_by_distribution"),
        ("exchange_utils", "exchange_loaded_objects_gather_object"),
        ("strategies.state_dict_saver", "save_state_dict_async_plan"),
        ("strategies.state_dict_saver", "verify_global_md_reuse"),
    )
    nvrx = "nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver"
    return (
        *(Target(f"{package}.{module}", name, _wrap_collective) for module, name in collectives),
        *(
            Target(nvrx, name, _wrap_collective, optional=True)
            for name in ("save_state_dict_async_plan", "verify_global_md_reuse")
        ),
        Target(
            f"{package}.strategies.torch",
            "mcore_to_pyt_state_dict",
            _wrap_template,
            _diagnose_reading(False, "is_loading"),
        ),
        Target(
            f"{package}.strategies.torch",
            "MCoreLoadPlanner.finish_plan",
            _wrap_collective,
            _diagnose_reading(True),
        ),
    )


def _wrap_finalize(original: Any, hit: Hit) -> Any:
    def save_state_dict_async_finalize(
        storage_writer: Any, global_metadata: Any, dist_wrapper: Any
    ) -> None:
        from vime_optim.planning.results import pack_results

        hit()
        sessions.finalize(original, storage_writer, global_metadata, dist_wrapper, pack_results)

    return save_state_dict_async_finalize


FIX = Fix(
    id="writer-commit",
    faults=("F14",),
    summary="a save is complete on all ranks or raises on all; a load is whole or refused",
    targets=(
        *commit_targets(),
        Target(f"{STRATEGIES}.state_dict_saver", "save_state_dict_async_finalize", _wrap_finalize),
        Target(
            f"{NVRX}.state_dict_saver",
            "save_state_dict_async_finalize",
            _wrap_finalize,
            optional=True,
        ),
    ),
    after=("planning",),
)

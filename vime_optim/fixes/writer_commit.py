"""A save is complete on all ranks or raises on all; a load is whole or refused.

Symptom: one rank fails and the others wait for ever; half of one save and half of another loads
(F14).
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
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vime_optim.commit import agreement
from vime_optim.errors import CheckpointError, WriterError
from vime_optim.fixes.places import (
    DIST_CHECKPOINTING,
    LOAD_PLANNER,
    NVRX,
    STRATEGIES,
    TORCH_STRATEGY,
    VALIDATION,
    in_load,
    in_save,
)
from vime_optim.probe import bind, missing_parameters, source_of
from vime_optim.registry import (
    NEEDED,
    Call,
    Diagnose,
    Diagnosis,
    Fix,
    Hit,
    fixed_upstream,
    not_understood,
    takes,
)

if TYPE_CHECKING:
    from vime_optim.commit.sessions import SaveSession

_COMMON = f"{STRATEGIES}.common"
_DIRECTORY = takes("checkpoint_dir")
_EXCHANGES = (
    "determine_main_replica_uniform_distribution",
    "exchange_by_distribution",
    "exchange_loaded_objects_gather_object",
)
_PLANNING = ("save_state_dict_async_plan", "verify_global_md_reuse")
_NOT_SAVED = "the checkpoint was not saved, as a rank failed"
_NOT_LOADED = "the checkpoint was not loaded, as a rank failed"
_LOAD_AGAIN = "the model may be half loaded: load this or an older checkpoint before going on"


FIX = Fix(
    id="writer-commit",
    faults=("F14",),
    summary="a save is complete on all ranks or raises on all; a load is whole or refused",
    targets=(in_save("checkpoint_dir"), in_load("checkpoint_dir")),
    after=("planning",),
)


def is_remote(call: Call) -> bool:
    """Paths of the multi-storage client are left to Megatron."""
    return str(call["checkpoint_dir"]).startswith("msc://")


def one_save(call: Call) -> AbstractContextManager[None]:
    """All ranks leave this block by an exception, or none does."""
    operation = agreement.Operation(_NOT_SAVED, str(call["checkpoint_dir"]), WriterError)
    return agreement.together(operation)


@contextmanager
def session(call: Call, hit: Hit) -> Iterator[SaveSession]:
    """Collective: the directory is locked, and freed of what was in it, until the commit."""
    from vime_optim.commit import sessions

    hit()
    agreement.point()  # all came so far: only now is an older save taken away
    opened = sessions.open_session(str(call["checkpoint_dir"]))
    try:
        with sessions.belonging_to(opened):
            yield opened
    except BaseException:
        opened.release()
        raise


def commit(session: SaveSession, request: Any) -> None:
    """Collective: all ranks have saved; an async save commits when it is finalized."""
    from vime_optim.commit import sessions

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
    from vime_optim.commit import load_check

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
    from vime_optim.commit import load_check
    from vime_optim.files.checked import noting

    hit()
    directory = str(call["checkpoint_dir"])
    comparison = load_check.check_before_load(directory, collective=operation is not None)
    with noting(comparison.chunks):
        yield
    comparison.finish()


def _diagnose_reading(alone: bool, *needed: str) -> Diagnose:
    """Needed where each rank plans and reads by itself (0.19 on), or where all do it together."""

    def diagnose(module: ModuleType, original: Any) -> Diagnosis:
        reason = missing_parameters(original, *needed)
        if reason:
            return not_understood(reason)
        if alone != ("no_dist=True" in source_of(module.TorchDistLoadShardedStrategy.load)):
            return fixed_upstream(f"of no use where ranks read {'together' if alone else 'alone'}")
        return NEEDED

    return diagnose


@FIX.wraps(VALIDATION, "determine_global_metadata")
@FIX.wraps(f"{DIST_CHECKPOINTING}.exchange_utils", _EXCHANGES)
@FIX.wraps(f"{STRATEGIES}.state_dict_saver", _PLANNING)
@FIX.wraps(f"{NVRX}.state_dict_saver", _PLANNING, optional=True)
@FIX.wraps(LOAD_PLANNER, "finish_plan", _diagnose_reading(True))
def _collective(original: Any, hit: Hit, *args: Any, **kwargs: Any) -> Any:
    """A function of Megatron that begins with a collective: not entered when a rank has failed."""
    agreement.point()
    return original(*args, **kwargs)


@FIX.wraps(TORCH_STRATEGY, "mcore_to_pyt_state_dict", _diagnose_reading(False, "is_loading"))
def _make_template(original: Any, hit: Hit, *args: Any, **kwargs: Any) -> Any:
    """Turns a template into what torch reads into, which up to 0.18 all ranks do together."""
    made = original(*args, **kwargs)
    if kwargs.get("is_loading", args[1] if len(args) > 1 else False):
        agreement.point()
    return made


_RANK0_WRITES = {
    "save_config": "metadata.json",
    "save_common": "common.pt",
    "save_integrity_manifest": "integrity.json",
}


@FIX.wraps(f"{DIST_CHECKPOINTING}.core", "save_config", _DIRECTORY)
# A method up to 0.16, a function in 0.17 and 0.18, part of the sharded state from 0.19 on.
@FIX.wraps(f"{_COMMON}:TorchCommonSaveStrategy", "save_common", _DIRECTORY, optional=True)
@FIX.wraps(_COMMON, "save_common", _DIRECTORY, optional=True)
@FIX.wraps(VALIDATION, "save_integrity_manifest", _DIRECTORY, optional=True)
def _rank0_step(original: Any, hit: Hit, *args: Any, **kwargs: Any) -> Any:
    """A step that rank 0 takes alone: its failure is raised later, by all."""
    from vime_optim.commit import sessions

    session = sessions.session_of(str(bind(original, *args, **kwargs)["checkpoint_dir"]))
    if session is None:
        return original(*args, **kwargs)
    written = _RANK0_WRITES[original.__name__]
    return sessions.rank0_step(session, written, functools.partial(original, *args, **kwargs))


@FIX.wraps(f"{STRATEGIES}.state_dict_saver", "save_state_dict_async_finalize")
@FIX.wraps(f"{NVRX}.state_dict_saver", "save_state_dict_async_finalize", optional=True)
def _finalize(
    original: Any, hit: Hit, storage_writer: Any, global_metadata: Any, dist_wrapper: Any
) -> None:
    from vime_optim.commit import sessions
    from vime_optim.planning.results import pack_results

    hit()
    sessions.finalize(original, storage_writer, global_metadata, dist_wrapper, pack_results)

"""Files are written in one pass, with digests, without copies.

Symptom: a file that is cut short or damaged loads as it is (F14).
Cause: nothing is noted of what was written.
Changes: files are written by our writer, which digests on the way (commit/file_plan, commit/task,
files/fastfile), and the digests are kept beside them in a manifest.
Leaves alone: planning, `.metadata`, multi-storage-client paths, writers with stream extensions, or
with another method that writes in the place of Megatron's.
Remove when: upstream's checkpoints say what belongs to them, with digests.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from vime_optim.fixes.places import NVRX, STRATEGIES
from vime_optim.probe import missing_parameters, missing_words
from vime_optim.registry import NEEDED, Diagnosis, Fix, Hit, not_understood

_WRITER = "filesystem_async:FileSystemWriterAsync"


FIX = Fix(
    id="writer-files",
    faults=("F14",),
    summary="files written in one pass with digests, without copies",
    requires=("writer-async",),
)


@FIX.wraps(f"{STRATEGIES}.{_WRITER}", "get_save_function_and_args")
@FIX.wraps(f"{NVRX}.{_WRITER}", "get_save_function_and_args", optional=True)
def _save_function(original: Any, hit: Hit, self: Any) -> Any:
    from vime_optim.commit import file_plan

    ours = file_plan.save_function_and_args(self)
    if ours is None:
        return original(self)
    hit()
    return ours


@FIX.wraps(f"{STRATEGIES}.async_utils:AsyncRequest", "execute_sync")
@FIX.wraps(f"{NVRX}.core:AsyncRequest", "execute_sync", optional=True)
def _execute_sync(original: Any, hit: Hit, self: Any) -> None:
    from vime_optim.commit import agreement

    hit()
    agreement.point()  # all have planned, and none writes when one could not
    original(self)


def _diagnose_prepare(module: ModuleType, original: Any) -> Diagnosis:
    reason = missing_parameters(original, "plan", "planner")
    reason = reason or missing_words(original, "results_queue")
    if reason:
        return not_understood(reason)
    if not hasattr(module, "_split_by_separation_hint"):
        return not_understood("its module does not separate items by a hint")
    return NEEDED


@FIX.wraps(f"{STRATEGIES}.{_WRITER}", "prepare_write_data", _diagnose_prepare)
@FIX.wraps(f"{NVRX}.{_WRITER}", "prepare_write_data", _diagnose_prepare, optional=True)
def _prepare(original: Any, hit: Hit, self: Any, plan: Any, planner: Any) -> None:
    if not _writes_plain_files(self):
        original(self, plan, planner)
        return
    from vime_optim.commit import file_plan

    hit()
    file_plan.prepare_write_data(sys.modules[original.__module__], self, plan, planner)


def _writes_plain_files(writer: Any) -> bool:
    """Not through the multi-storage client, and without extensions that transform the stream.
    VIME_OPTIM_ASYNC=off leaves every file to Megatron."""
    from vime_optim import settings

    if getattr(writer, "use_msc", False) or settings.current().async_mode == "off":
        return False
    if getattr(writer, "open_file", open) is not open:  # nvidia-resiliency-ext
        return False
    if _writes_its_own_way(type(writer)):
        return False
    return not getattr(getattr(writer, "transforms", None), "extensions", None)


def _writes_its_own_way(kind: type) -> bool:
    """Whether somebody put another method in the place of one that writes files."""
    modules = [f"{place}.{_WRITER.partition(':')[0]}" for place in (STRATEGIES, NVRX)]
    home = next((base.__module__ for base in kind.__mro__ if base.__module__ in modules), "")
    written = (getattr(kind, name) for name in dir(kind) if name.startswith("write_preloaded_data"))
    return bool(home) and any(method.__module__ != home for method in written)


@FIX.wraps(f"{STRATEGIES}.{_WRITER}", "finish")
@FIX.wraps(f"{NVRX}.{_WRITER}", "finish", optional=True)
def _finish(original: Any, hit: Hit, self: Any, metadata: Any, results: Any) -> None:
    from vime_optim.commit import sessions
    from vime_optim.files.manifest import MANIFEST_MARK
    from vime_optim.planning.metadata_file import write_metadata

    plain = _writes_plain_files(self)
    session = sessions.session_of(self.checkpoint_dir) if plain else None
    if session is not None:
        session.take_away_marks()  # of a save that ended here since this one began
    records = sessions.records_of(results) if plain else None
    if records is not None:
        setattr(metadata, MANIFEST_MARK, True)
    else:
        vars(metadata).pop(MANIFEST_MARK, None)  # metadata may be that of an earlier save
    if records is not None:
        write_metadata(original, self, metadata, results)
    else:
        original(self, metadata, results)
    if session is not None:
        session.written.add(".metadata")
    if records is not None and (session is None or session.error is None):
        hit()
        sessions.write_manifest(str(self.checkpoint_dir), records)

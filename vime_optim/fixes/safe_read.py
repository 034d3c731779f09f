"""A load runs no code of the checkpoint: `.metadata` and stored objects are read by a closed list.

Symptom: a checkpoint that somebody else wrote runs any code with the rights of the job (F31).
Cause: torch unpickles `.metadata` as it is, and DCP's planner reads objects without weights_only.
Changes: `.metadata` is read by our parser, which knows DCP's classes alone; objects are read under
weights_only, where torch's list, Megatron's and the user's (add_safe_globals) count. Optimizer
classes in param groups (F9) are dropped. Pipes, devices and absurd sizes are refused.
Leaves alone: tensors (always read under weights_only), and other planners and readers.
Remove when: torch reads both by a closed list.
"""

from __future__ import annotations

import importlib
import io
import os
from types import ModuleType
from typing import Any

from vime_optim.errors import VimeOptimError
from vime_optim.fixes.places import DCP
from vime_optim.probe import missing_parameters, missing_words, source_of
from vime_optim.registry import NEEDED, Diagnosis, Fix, Hit, fixed_upstream, not_understood

METADATA_LIMIT_BYTES = 1 << 30
_READER = f"{DCP}.filesystem:FileSystemReader"


FIX = Fix(
    id="safe-read",
    faults=("F31",),
    summary="a load runs no code of the checkpoint",
)


def _diagnose_read_metadata(module: ModuleType, original: Any) -> Diagnosis:
    if "pickle" not in source_of(original):
        return fixed_upstream("it does not unpickle")
    reason = missing_words(original, "_get_metadata_path", "storage_meta", "load_id")
    return not_understood(reason) if reason else NEEDED


@FIX.wraps(_READER, "read_metadata", _diagnose_read_metadata)
def _read_metadata(original: Any, hit: Hit, self: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.distributed.checkpoint.metadata import StorageMeta

    from vime_optim.commit.load_check import note_cause

    hit()
    path = self._get_metadata_path(kwargs.get("rank"))
    try:
        metadata = _metadata_of(self, path)
    except VimeOptimError as error:
        note_cause(error)
        raise
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()
    metadata.storage_meta.load_id = self.load_id
    return metadata


def _metadata_of(reader: Any, path: Any) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystem

    from vime_optim.commit.loading import once
    from vime_optim.files.dcp_metadata import load_metadata
    from vime_optim.files.plain import read_plain, too_large

    where = str(path)
    if type(reader.fs) is FileSystem and os.path.exists(path):
        return once(where, lambda: load_metadata(read_plain(path, METADATA_LIMIT_BYTES), where))
    with reader.fs.create_stream(path, "rb") as stream:
        data: bytes = stream.read(METADATA_LIMIT_BYTES + 1)
    if len(data) > METADATA_LIMIT_BYTES:
        raise too_large(where, "more", METADATA_LIMIT_BYTES)
    return load_metadata(data, where)


@FIX.wraps(_READER, "read_data")
def _read_data(original: Any, hit: Hit, self: Any, plan: Any, planner: Any) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystem

    from vime_optim.files.plain import require_plain

    if type(self.fs) is FileSystem:
        names = {self.storage_data[item.storage_index].relative_path for item in plan.items}
        for path in (self.fs.concat_path(self.path, name) for name in sorted(names)):
            if os.path.exists(path):  # else torch says so
                require_plain(path, os.stat(path).st_mode)
    return original(self, plan, planner)


def _diagnose_load_bytes(module: ModuleType, original: Any) -> Diagnosis:
    reason = missing_parameters(original, "read_item", "value")
    if reason:
        return not_understood(reason)
    if "weights_only=False" not in source_of(original):
        return fixed_upstream("it reads under weights_only")
    reason = missing_words(original, "flatten_state_dict", "original_state_dict", "mappings")
    return not_understood(reason) if reason else NEEDED


@FIX.wraps(f"{DCP}.default_planner:DefaultLoadPlanner", "load_bytes", _diagnose_load_bytes)
def _load_bytes(original: Any, hit: Hit, self: Any, read_item: Any, value: io.BytesIO) -> None:
    from vime_optim.files.objects import load_object

    hit()
    key = read_item.dest_index.fqn
    loaded = load_object(value.getbuffer(), f"{_file_of(self, read_item)}: {key}")
    if self.flatten_state_dict:
        nested: Any = importlib.import_module(f"{DCP}._nested_dict")
        nested.set_element(self.original_state_dict, self.mappings[key], loaded)
    else:
        self.state_dict[key] = loaded


def _file_of(planner: Any, read_item: Any) -> str:
    """The file that holds an object, for errors."""
    places = getattr(getattr(planner, "metadata", None), "storage_data", None) or {}
    return str(getattr(places.get(read_item.storage_index), "relative_path", "an object"))

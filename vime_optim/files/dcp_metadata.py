"""Reads `.metadata`, the pickle of torch.distributed.checkpoint (DCP), without trusting it.

Python's C unpickler must not see a hostile file: one opcode makes it fill gigabytes of memo. What
the pickle may cost is looked through first (`pickles.audit`), and a closed list of classes is used.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import pathlib
import pickle
import sys
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed.checkpoint.filesystem as dcp_filesystem
import torch.distributed.checkpoint.metadata as dcp_metadata

from vime_optim.errors import CheckpointError
from vime_optim.files.cover import fault_of
from vime_optim.files.geometry import Box
from vime_optim.files.pickles import UnknownName, loads
from vime_optim.files.stand_ins import inert_class

MCORE_METADATA = "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata"
"""megatron-core up to 0.15 wraps the metadata in this class (strategies/torch.py)."""
_SAVE_PLAN = "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan"


class MCoreMetadata(dcp_metadata.Metadata):
    """Stand-in for the class of that name in megatron-core up to 0.15."""


_CLASSES: dict[str, Any] = {
    "torch.Size": torch.Size,
    "collections.OrderedDict": collections.OrderedDict,
    "builtins.set": set,
    "builtins.list": list,  # columns of a plan that another writer than ours pickled
    "torch.serialization._get_layout": torch.serialization._get_layout,
    "torch.distributed.checkpoint.filesystem._StorageInfo": dcp_filesystem._StorageInfo,
    "torch.distributed.checkpoint.filesystem._StoragePrefix": dcp_filesystem._StoragePrefix,
    MCORE_METADATA: MCoreMetadata,
}
for _name in (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
):
    _CLASSES[f"torch.distributed.checkpoint.metadata.{_name}"] = getattr(dcp_metadata, _name)
for _module in ("pathlib", "pathlib._local"):
    _CLASSES[f"{_module}.PosixPath"] = pathlib.PurePosixPath
    _CLASSES[f"{_module}.PurePosixPath"] = pathlib.PurePosixPath
    _CLASSES[f"{_module}.WindowsPath"] = pathlib.PureWindowsPath
    _CLASSES[f"{_module}.PureWindowsPath"] = pathlib.PureWindowsPath
for _value in list(vars(torch).values()):
    if isinstance(_value, torch.dtype):
        _CLASSES[str(_value)] = _value

_PLANNED = tuple(
    f"torch.distributed.checkpoint.planner.{name}"
    for name in ("SavePlan", "WriteItem", "TensorWriteData", "BytesIOWriteData", "WriteItemType")
)
"""megatron-core 0.16 keeps its save plans in the metadata for the next save; a job needs them."""
for _name in _PLANNED:
    _CLASSES[_name] = inert_class(_name)
_CLASSES[_SAVE_PLAN] = inert_class(_SAVE_PLAN)


def _unpickle(data: bytes, classes: Mapping[str, Any], where: str) -> Any:
    try:
        with _without_collection():
            return loads(data, classes)
    except UnknownName as error:
        raise CheckpointError(
            "The checkpoint's .metadata asks to import a name that DCP never writes; "
            "nothing was run.",
            where=".metadata",
            got=str(error),
            expected="classes of torch.distributed.checkpoint alone",
            next_step="Do not load this checkpoint elsewhere before you know who wrote it.",
        ) from None
    except MemoryError:
        raise
    except Exception as error:
        raise _damaged(error, where) from error


def _damaged(error: Exception, where: str) -> CheckpointError:
    """Anything may come out of a damaged pickle: TypeError from a constructor, struct.error. All of
    it means that this is no DCP metadata."""
    return CheckpointError(
        "The checkpoint's .metadata is damaged or not written by torch.distributed.checkpoint.",
        where=where,
        got=f"{type(error).__name__}: {error}"[:200],
        next_step="Copy it again from its source; without it no tensor can be located.",
    )


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """A million small objects come to life at once; looking for garbage among them again and again
    takes four times as long as making them."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def load_metadata(data: bytes, where: str = ".metadata") -> Any:
    """What `pickle.load` gives for a `.metadata` file, for a job that loads it: torch's classes,
    Megatron's where they are imported, and those that the user allowed with
    torch.serialization.add_safe_globals. Executes nothing else.

    Raises:
        CheckpointError: not DCP's, hostile or damaged; names a class outside of the list; or a
            data file outside of the directory.
    """
    raw = _unpickle(data, _classes_of_job(), where)
    if not isinstance(raw, dcp_metadata.Metadata):
        raise _damaged(TypeError(f"a {type(raw).__name__} instead of Metadata"), where)
    try:
        for info in dict(raw.storage_data or {}).values():
            _require_inside(info)
    except (TypeError, ValueError, AttributeError) as error:
        raise _damaged(error, where) from error
    return raw


def _require_inside(info: Any) -> None:
    name = info.relative_path
    if type(name) is not str or name.startswith("/") or "\0" in name or ".." in name.split("/"):
        raise ValueError(f"a data file {name!r} outside of the directory")
    if any(type(n) is not int or n < 0 for n in (info.offset, info.length)):
        raise ValueError(f"a place at {info.offset!r} of length {info.length!r}")


def _classes_of_job() -> Mapping[str, Any]:
    real = {name: _imported(name) for name in (*_PLANNED, MCORE_METADATA, _SAVE_PLAN)}
    allowed = {}
    for entry in torch.serialization.get_safe_globals():
        value, name = entry if isinstance(entry, tuple) else (entry, None)
        allowed[name or f"{value.__module__}.{value.__qualname__}"] = value
    return ChainMap({n: v for n, v in real.items() if v is not None}, _CLASSES, allowed)


def _imported(dotted: str) -> Any:
    module, _, name = dotted.rpartition(".")
    return getattr(sys.modules.get(module), name, None)


@dataclass(frozen=True)
class Location:
    """Where an item's bytes are: a file of the directory, offset and length in bytes."""

    file: str
    offset_bytes: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class Chunk(Box):
    """A box of a tensor, and where its elements are stored."""

    location: Location | None


@dataclass(frozen=True)
class TensorInfo:
    """What a tensor is, wherever it is stored."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class TensorEntry(TensorInfo):
    """A tensor of the checkpoint, and the chunks that make it up."""

    key: str
    chunks: tuple[Chunk, ...]

    def cover_fault(self) -> str | None:
        """What is wrong with the cover by the chunks, in words; None where nothing is."""
        if not self.shape:
            held = len(self.chunks)
            return None if held == 1 else f"{held} chunks of a single number"
        fault = fault_of(self.chunks, self.shape, full=True)
        if fault is None:
            return None
        what = "held twice" if fault.boxes else "held by no chunk"
        return f"the part at {fault.offset} of size {fault.size} is {what}"


@dataclass
class Index:
    """Everything that `.metadata` says, checked and in plain types.

    `raw` is the DCP object itself, for writing it again with other locations.
    """

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    objects: dict[str, Location | None] = field(default_factory=dict)
    raw: Any = None
    wrapped_by_megatron: bool = False


def parse_metadata(data: bytes) -> Index:
    """The checked content of a `.metadata` file.

    Raises:
        CheckpointError: not DCP's, hostile, or damaged.
    """
    raw = _unpickle(data, _CLASSES, ".metadata")
    try:
        return _index(raw)
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        raise _damaged(error, ".metadata") from error


def _index(raw: Any) -> Index:
    if not isinstance(raw, dcp_metadata.Metadata):
        raise TypeError(f"a {type(raw).__name__} instead of Metadata")
    index = Index(raw=raw, wrapped_by_megatron=isinstance(raw, MCoreMetadata))
    located: dict[tuple[str, tuple[int, ...] | None], Location] = {}
    for item, info in dict(raw.storage_data or {}).items():
        offset = getattr(item, "offset", None)
        place = None if offset is None else _sizes(offset)
        located[_text(item.fqn), place] = _location(info)
    for key, entry in raw.state_dict_metadata.items():
        if isinstance(entry, dcp_metadata.TensorStorageMetadata):
            index.tensors[_text(key)] = _tensor(key, entry, located)
        elif isinstance(entry, dcp_metadata.BytesStorageMetadata):
            index.objects[_text(key)] = located.get((key, None))
        else:
            raise TypeError(f"entry of {key!r} is a {type(entry).__name__}")
    return index


def _tensor(key: str, entry: Any, located: dict[Any, Location]) -> TensorEntry:
    dtype = entry.properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype of {key!r} is a {type(dtype).__name__}")
    shape = _sizes(entry.size)
    chunks = []
    for chunk in entry.chunks:
        box = Box(_sizes(chunk.offsets), _sizes(chunk.sizes))
        if not box.is_within(shape):
            raise ValueError(f"a chunk of {key!r} reaches out of its tensor")
        chunks.append(Chunk(box.offset, box.size, located.get((key, box.offset))))
    return TensorEntry(dtype, shape, key, tuple(chunks))


def _location(info: Any) -> Location:
    if not isinstance(info, dcp_filesystem._StorageInfo):
        raise TypeError(f"a location is a {type(info).__name__}")
    offset, length = info.offset, info.length
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise ValueError(f"offset {offset!r} and length {length!r} of a location")
    if getattr(info, "transform_descriptors", None):
        raise ValueError("compressed items (DCP extensions) are not supported")
    return Location(_text(info.relative_path), offset, length)


def _sizes(values: Any) -> tuple[int, ...]:
    sizes = tuple(values)
    if any(type(size) is not int or size < 0 or size > 2**62 for size in sizes):
        raise ValueError(f"sizes {sizes[:8]!r}")
    return sizes


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"a name is a {type(value).__name__}")
    return value


def dump_metadata(
    index: Index, located: dict[str, Location], attributes: Mapping[str, Any] | None = None
) -> bytes:
    """`.metadata` again, with other locations for the objects named in `located`, and with further
    attributes, which readers pass over.

    Metadata that an old megatron-core wrapped is written as torch's own class, which every release
    from 0.15 on reads (they take the wrapper's extra data with getattr).
    """
    raw = index.raw
    storage = dict(raw.storage_data)
    for item in list(storage):
        if item.fqn in located:
            place = located[item.fqn]
            storage[item] = dcp_filesystem._StorageInfo(
                place.file, place.offset_bytes, place.length_bytes
            )
    plain = dcp_metadata.Metadata(
        state_dict_metadata=raw.state_dict_metadata,
        planner_data=getattr(raw, "planner_data", None),
        storage_data=storage,
        storage_meta=None,
        version=getattr(raw, "version", None),
    )
    vars(plain).update(attributes or {})
    return pickle.dumps(plain)

"""Reads `.metadata`, the pickle of torch.distributed.checkpoint (DCP), without trusting it.

Python's C unpickler must not see a hostile file: one opcode makes it fill gigabytes of memo. The
unpickler of the standard library that is written in Python is used instead, with the opcodes that
allocate by declaration or name things sideways taken out, and a closed list of classes.
"""

from __future__ import annotations

import collections
import io
import pathlib
import pickle
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint.filesystem as dcp_filesystem
import torch.distributed.checkpoint.metadata as dcp_metadata

from vime_optim.checkpoint.inert import Inert, inert_class
from vime_optim.errors import CheckpointError

MCORE_METADATA = "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata"
"""megatron-core up to 0.15 wraps the metadata in this class (strategies/torch.py)."""
_SAVE_PLAN = "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan"


class MCoreMetadata(dcp_metadata.Metadata):
    """Stand-in for the class of that name in megatron-core up to 0.15."""


_CLASSES: dict[str, Any] = {
    "torch.Size": torch.Size,
    "collections.OrderedDict": collections.OrderedDict,
    "builtins.set": set,
    "torch.serialization._get_layout": torch.serialization._get_layout,
    "torch.distributed.checkpoint.filesystem._StorageInfo": dcp_filesystem._StorageInfo,
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

for _name in ("SavePlan", "WriteItem", "TensorWriteData", "BytesIOWriteData", "WriteItemType"):
    # megatron-core 0.16 keeps its save plans in the metadata for the next save; not needed here.
    _name = f"torch.distributed.checkpoint.planner.{_name}"
    _CLASSES[_name] = inert_class(_name)
_CLASSES[_SAVE_PLAN] = inert_class(_SAVE_PLAN)

_BUILDABLE = (
    Inert,
    dcp_metadata.BytesStorageMetadata,
    dcp_metadata.ChunkStorageMetadata,
    dcp_metadata.Metadata,
    dcp_metadata.MetadataIndex,
    dcp_metadata.StorageMeta,
    dcp_metadata.TensorProperties,
    dcp_metadata.TensorStorageMetadata,
    dcp_filesystem._StorageInfo,
)

_FORBIDDEN = (
    pickle.EXT1,
    pickle.EXT2,
    pickle.EXT4,
    pickle.INST,
    pickle.OBJ,
    pickle.PERSID,
    pickle.BINPERSID,
    pickle.BYTEARRAY8,
    pickle.NEXT_BUFFER,
    pickle.READONLY_BUFFER,
)


class _MetadataUnpickler(pickle._Unpickler):
    dispatch: ClassVar[dict[int, Any]] = {
        opcode: method
        for opcode, method in pickle._Unpickler.dispatch.items()
        if bytes([opcode]) not in _FORBIDDEN
    }

    def find_class(self, module: str, name: str) -> Any:
        dotted = f"{module.replace('__builtin__', 'builtins')}.{name}"
        if dotted not in _CLASSES:
            raise CheckpointError(
                "The checkpoint's .metadata asks to import a name that DCP never writes; "
                "nothing was run.",
                where=".metadata",
                got=dotted,
                expected="classes of torch.distributed.checkpoint alone",
                next_step="Do not load this checkpoint elsewhere before you know who wrote it.",
            )
        return _CLASSES[dotted]

    def load_build(self) -> None:
        # On a class, this opcode would set attributes of torch's own class in this process.
        target = self.stack[-2]  # type: ignore[attr-defined]
        if not isinstance(target, _BUILDABLE):
            raise pickle.UnpicklingError(f"state for a {type(target).__name__}")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build


@dataclass(frozen=True)
class Location:
    """Where an item's bytes are: a file of the directory, offset and length in bytes."""

    file: str
    offset_bytes: int
    length_bytes: int


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor: `offsets` and `sizes` in elements, one per dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    location: Location | None

    @property
    def numel(self) -> int:
        count = 1
        for size in self.sizes:
            count *= size
        return count


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the checkpoint: its whole shape, and the chunks that make it up."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def size_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


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
    try:
        raw = _MetadataUnpickler(io.BytesIO(data)).load()
        return _index(raw)
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        # Anything may come out of a damaged pickle: KeyError from the dispatch, TypeError from a
        # constructor, struct.error. All of it means that this is no DCP metadata.
        raise CheckpointError(
            "The checkpoint's .metadata is damaged or not written by torch.distributed.checkpoint.",
            where=".metadata",
            got=f"{type(error).__name__}: {error}"[:200],
            next_step="Copy it again from its source; without it no tensor can be located.",
        ) from error


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
        offsets, sizes = _sizes(chunk.offsets), _sizes(chunk.sizes)
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise ValueError(f"a chunk of {key!r} has another number of dimensions")
        if any(o + s > whole for o, s, whole in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"a chunk of {key!r} reaches out of its tensor")
        chunks.append(Chunk(offsets, sizes, located.get((key, offsets))))
    return TensorEntry(key, dtype, shape, tuple(chunks))


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


def dump_metadata(index: Index, located: dict[str, Location]) -> bytes:
    """`.metadata` again, with other locations for the objects named in `located`.

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
    return pickle.dumps(plain)

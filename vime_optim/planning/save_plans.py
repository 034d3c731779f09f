"""A rank's SavePlan as columns, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from vime_optim.files.cover import Ints, as_array
from vime_optim.planning.packed import Boxes

_NONE = -1
_KIND = ("dtype", "layout", "requires_grad", "pin_memory")


class _Strange(Exception):
    """A plan that columns cannot hold."""


class PackedPlan(SavePlan):
    """A SavePlan that is columns until its items are asked for. Pickled, it is a plain SavePlan."""

    def __new__(cls, columns: Boxes | None = None, **fields: Any) -> Any:
        # dataclasses.replace() makes a changed copy from its fields.
        return super().__new__(cls) if columns is not None else SavePlan(**fields)

    def __init__(self, columns: Boxes) -> None:
        values = {"columns": columns, "storage_data": None, "planner_data": None, "usable": True}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        # Asked only for what is not there: `items`, the first time.
        if name != "items":
            raise AttributeError(name)
        items = list(_items(self.__dict__["columns"]))
        object.__setattr__(self, "items", items)
        return items

    def __reduce__(self) -> Any:
        return SavePlan, (self.items, self.storage_data, self.planner_data)


def pack_plan(plan: Any) -> Boxes | None:
    """The columns of a plan, or None when it has more to it than they hold."""
    if type(plan) is not SavePlan or plan.planner_data or plan.storage_data is not None:
        return None
    if not getattr(plan, "usable", True):
        return None
    try:
        return _columns(plan.items)
    except (_Strange, AttributeError, ValueError, OverflowError, TypeError):
        return None


def _columns(items: Sequence[Any]) -> Boxes:
    numbers: dict[str, int] = {}
    whole: list[tuple[Any, Any]] = []
    """(whole shape, kind) of each key, the same for all of its items."""
    key_of, hints = [], []
    lo: dict[int, list[Sequence[int]]] = {}
    size: dict[int, list[Sequence[int]]] = {}
    for item in items:
        number = numbers.setdefault(item.index.fqn, len(numbers))
        shape, kind = _whole_of(item)
        if number == len(whole):
            whole.append((shape, kind))
        elif whole[number] != (shape, kind):
            raise _Strange
        key_of.append(number)
        hints.append(_NONE if item.index.index is None else item.index.index)
        if shape is not None:
            chunk = item.tensor_data.chunk
            lo.setdefault(len(shape), []).append(chunk.offsets)
            size.setdefault(len(shape), []).append(chunk.sizes)
    return Boxes(
        tuple(numbers),
        tuple(shape for shape, _ in whole),
        tuple(kind for _, kind in whole),
        np.array(key_of, dtype=np.int64),
        np.array(hints, dtype=np.int64),
        {axes: as_array(rows, axes) for axes, rows in lo.items()},
        {axes: as_array(rows, axes) for axes, rows in size.items()},
    )


def _whole_of(item: Any) -> tuple[tuple[int, ...] | None, tuple[Any, ...] | None]:
    """The whole tensor's shape and its kind; None and None for an object."""
    index, data = item.index, item.tensor_data
    if type(item) is not WriteItem or type(index) is not MetadataIndex:
        raise _Strange
    if getattr(item, "bytes_io_data", None) is not None:  # not there in torch 2.6
        raise _Strange
    if item.type == WriteItemType.BYTE_IO and data is None and index.offset is None:
        return None, None
    if item.type != WriteItemType.SHARD or index.offset != data.chunk.offsets:
        raise _Strange
    if type(data.properties) is not TensorProperties or (index.index or 0) < 0:
        raise _Strange
    return tuple(data.size), _kind_of(data.properties)


def _items(columns: Boxes) -> Iterator[WriteItem]:
    chunks = {axes: iter(LazyChunks(lo, columns.size[axes])) for axes, lo in columns.lo.items()}
    properties = [None if kind is None else properties_of(kind) for kind in columns.kinds]
    sizes = [None if shape is None else torch.Size(shape) for shape in columns.shapes]
    for number, hint in zip(columns.key_of.tolist(), columns.hints.tolist(), strict=True):
        fqn, shape = columns.keys[number], sizes[number]
        index = None if hint == _NONE else hint
        if shape is None:
            yield WriteItem(MetadataIndex(fqn, None, index), WriteItemType.BYTE_IO)
            continue
        chunk = next(chunks[len(shape)])
        data = TensorWriteData(chunk, properties[number], shape)
        place = MetadataIndex(fqn, chunk.offsets, index)
        yield WriteItem(place, WriteItemType.SHARD, tensor_data=data)


class LazyChunks(Sequence[ChunkStorageMetadata]):
    """Chunks of one tensor as columns; torch's objects are made when they are asked for.

    Attributes:
        lo, size: int64 [chunks, axes].
    """

    def __init__(self, lo: Ints, size: Ints) -> None:
        self.lo = lo
        self.size = size

    def __len__(self) -> int:
        return len(self.lo)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return list(LazyChunks(self.lo[at], self.size[at]))
        return next(iter(LazyChunks(self.lo[at][None], self.size[at][None])))

    def __iter__(self) -> Iterator[ChunkStorageMetadata]:
        size = torch.Size
        for offset, length in zip(self.lo.tolist(), self.size.tolist(), strict=True):
            yield ChunkStorageMetadata(size(offset), size(length))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LazyChunks):
            return bool(np.array_equal(self.lo, other.lo) and np.array_equal(self.size, other.size))
        return list(self) == other

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return list, (list(self),)


def _kind_of(properties: Any) -> tuple[Any, ...]:
    values = [getattr(properties, name) for name in _KIND]
    return (*values, str(properties.memory_format).removeprefix("torch."))


def properties_of(kind: tuple[Any, ...]) -> TensorProperties:
    *values, memory_format = kind
    named = dict(zip(_KIND, values, strict=True))
    return TensorProperties(**named, memory_format=getattr(torch, memory_format))

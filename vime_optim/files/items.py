"""One tensor of a `.distcp` file, read by parts and without torch.load.

DCP stores each chunk as a torch.save archive: an uncompressed zip whose `data.pkl` says dtype, size
and stride and whose `data/N` holds the elements. Their place in the file is found once; after that
any flat range of elements is one read at a known offset.
"""

from __future__ import annotations

import functools
import io
import math
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import IO, Any, NamedTuple

import numpy as np
import torch

from vime_optim.errors import CheckpointError
from vime_optim.files.geometry import extent, row_major
from vime_optim.files.pickles import audit, loads
from vime_optim.files.plain import no_archive
from vime_optim.files.safe_load import open_archive, read_data_pickle

_PICKLE_LIMIT_BYTES = 64 * 1024
"""Largest data.pkl of a single tensor; real ones take about 200 bytes."""

_AUDITED_BYTES = 16 * 1024 * 1024
"""Largest data.pkl that torch's reader may see: subclasses of tensors hold more."""

_FRAME_LIMIT_BYTES = 4096
_SAME_LENGTH_LIMIT = 4

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")


class ImpossibleTensor(CheckpointError):
    """A stored tensor of more elements than its storage has, of stride 0 for example."""


@dataclass(frozen=True)
class ItemLayout:
    """Where a chunk's elements lie.

    Attributes:
        dtype: the stored dtype.
        shape: the chunk's sizes.
        start_bytes: offset in the file of the first element.
        strides_elem: strides, in elements; None where the elements are contiguous.
        extent_elem: elements from the first to the last one, gaps included.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start_bytes: int
    strides_elem: tuple[int, ...] | None
    extent_elem: int


class FileWindow(io.RawIOBase):
    """A read-only file object over a part of an open file; the file's own position stays."""

    def __init__(self, descriptor: int, offset_bytes: int, length_bytes: int) -> None:
        self._descriptor, self._offset, self._length = descriptor, offset_bytes, length_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("seek before the start")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        room = memoryview(buffer)[: max(0, self._length - self._position)]
        count = os.preadv(self._descriptor, [room], self._offset + self._position)
        self._position += count
        return count


class _Tensor(NamedTuple):
    """What a pickle says of its tensor. No class whose attributes a pickle could set."""

    dtype: torch.dtype
    record: str
    offset_elem: int
    shape: tuple[int, ...]
    strides_elem: tuple[int, ...]


def _storage(pid: Any) -> tuple[torch.dtype, str]:
    kind, dtype, record = pid[:3]
    if kind != "storage" or not isinstance(dtype, torch.dtype) or type(record) is not str:
        raise pickle.UnpicklingError("a storage of an unknown kind")
    return dtype, record


def _rebuild(storage: Any, offset: Any, shape: Any, strides: Any, *_rest: Any) -> _Tensor:
    dtype, record = storage
    numbers = (offset, *shape, *strides)
    if not isinstance(dtype, torch.dtype) or any(type(n) is not int or n < 0 for n in numbers):
        raise pickle.UnpicklingError("a tensor with impossible sizes")
    return _Tensor(dtype, record, offset, tuple(shape), tuple(strides))


def _rebuild_v3(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> _Tensor:
    _, record = storage
    return _rebuild((rest[2], record), offset, shape, strides)


def _rebuild_parameter(data: Any, *_rest: Any) -> Any:
    return data


_NAMES: dict[str, Any] = {
    "torch._utils._rebuild_tensor_v2": _rebuild,
    "torch._utils._rebuild_tensor_v3": _rebuild_v3,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "collections.OrderedDict": OrderedDict,
    "torch.storage.UntypedStorage": torch.uint8,
    **{f"torch.{n}": v for n, v in vars(torch).items() if isinstance(v, torch.dtype)},
    **{f"torch.{n}": v for v, n in torch.storage._dtype_to_storage_type_map().items()},
}
"""What a tensor's pickle may name. A type of storages stands for its dtype."""


def read_layout(window: FileWindow, offset_bytes: int, length_bytes: int, where: str) -> ItemLayout:
    """Finds a chunk's elements in its file.

    Args:
        window: the item's bytes.
        offset_bytes: where the item starts in its file.
        length_bytes: the item's length.
        where: file and key, for errors.

    Raises:
        CheckpointError: hostile, truncated, or not a single tensor.
    """
    try:
        with open_archive(_as_file(window)) as archive:
            data = read_data_pickle(archive, length_bytes, _PICKLE_LIMIT_BYTES)
            return _layout(archive, window, _tensor(data), offset_bytes)
    except (ImpossibleTensor, MemoryError):
        raise
    except Exception as error:
        raise no_archive(where, error) from error


def audit_item(window: FileWindow, length_bytes: int) -> None:
    """Refuse a tensor's archive whose pickle is not what torch's own reader should run.

    Raises:
        ValueError, pickle.UnpicklingError, zipfile.BadZipFile: says why.
    """
    with open_archive(_as_file(window)) as archive:
        audit(read_data_pickle(archive, length_bytes, _AUDITED_BYTES))


@functools.lru_cache(maxsize=512)
def _tensor(data: bytes) -> _Tensor:
    """What a data.pkl describes; the tensors of one shape have the same one."""
    tensor = loads(data, _NAMES, _storage)
    if not isinstance(tensor, _Tensor):
        raise ValueError(f"holds a {type(tensor).__name__}, not a tensor")
    return tensor


def _as_file(window: FileWindow) -> IO[bytes]:
    return window  # type: ignore[return-value]


def _layout(
    archive: zipfile.ZipFile, window: FileWindow, tensor: _Tensor, offset_bytes: int
) -> ItemLayout:
    root = next(n for n in archive.namelist() if n.endswith("/data.pkl"))[: -len("data.pkl")]
    order = b""
    if f"{root}byteorder" in archive.namelist():
        with archive.open(f"{root}byteorder") as stream:
            order = stream.read(16)
    if order not in (b"", b"little"):
        raise ValueError(f"byte order {order[:10]!r}")
    entry = archive.getinfo(f"{root}data/{tensor.record}")
    itemsize = tensor.dtype.itemsize
    reach = extent(tensor.shape, tensor.strides_elem)
    if (tensor.offset_elem + reach) * itemsize > entry.file_size:
        raise ValueError("the tensor reaches out of its storage")
    window.seek(entry.header_offset)
    header = _LOCAL_HEADER.unpack(window.read(_LOCAL_HEADER.size))
    data_start = entry.header_offset + _LOCAL_HEADER.size + header[9] + header[10]
    if header[0] != b"PK\x03\x04" or data_start + entry.file_size > window.seek(0, os.SEEK_END):
        raise ValueError("the zip's entries do not fit the file")
    numel = math.prod(tensor.shape)
    if numel > max(1, entry.file_size // itemsize):
        raise ImpossibleTensor(
            "An item of the checkpoint claims to be larger than what it stores.",
            got=f"{numel} elements in {entry.file_size} bytes",
            next_step="Do not use this checkpoint: torch.save writes nothing like it for Megatron.",
        )
    start = offset_bytes + data_start + tensor.offset_elem * itemsize
    strides = None if _contiguous(tensor.shape, tensor.strides_elem) else tensor.strides_elem
    return ItemLayout(tensor.dtype, tensor.shape, start, strides, reach)


def _contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    steps = zip(shape, strides, row_major(shape), strict=True)
    return 0 in shape or all(size == 1 or step == right for size, step, right in steps)


@dataclass(frozen=True, slots=True)
class _Frame:
    """What an item of one tensor looks like around its elements; `start` is relative to it."""

    head: bytes
    tail: bytes
    layout: ItemLayout


class Layouts:
    """Layouts of many items of few shapes, found without parsing each archive. Used by one thread.

    A torch.save archive is a head (the pickle among it), the elements and a tail (the zip's
    directory). Where an item has the very head and tail of one that was parsed, its elements lie in
    the same place. That holds for the files of our own writer, which stores no CRC-32; in stock's
    the tail differs from tensor to tensor, and each is parsed.
    """

    def __init__(self) -> None:
        self._frames: dict[int, list[_Frame]] = {}
        self.parsed = 0
        """Archives that were parsed, not recognized."""

    def find(self, descriptor: int, offset: int, length: int, where: str) -> ItemLayout:
        """Where the elements of the item at [offset, offset + length) of a file lie, in bytes.

        Raises:
            CheckpointError: as read_layout.
        """
        known = self._frames.setdefault(length, [])
        for frame in known:
            head = os.pread(descriptor, len(frame.head), offset)
            if head != frame.head:
                continue
            tail = os.pread(descriptor, len(frame.tail), offset + length - len(frame.tail))
            if tail == frame.tail:
                return replace(frame.layout, start_bytes=offset + len(head))
        self.parsed += 1
        layout = read_layout(FileWindow(descriptor, offset, length), offset, length, where)
        head_bytes = layout.start_bytes - offset
        tail_bytes = length - head_bytes - layout.extent_elem * layout.dtype.itemsize
        if max(head_bytes, tail_bytes) <= _FRAME_LIMIT_BYTES and len(known) < _SAME_LENGTH_LIMIT:
            head = os.pread(descriptor, head_bytes, offset)
            tail = os.pread(descriptor, tail_bytes, offset + length - tail_bytes)
            known.append(_Frame(head, tail, layout))
        return layout


def carrier_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The numpy dtype that carries a torch dtype's bits (numpy has no bfloat16 or float8)."""
    sizes = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}
    return np.dtype(sizes[dtype.itemsize])

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
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import torch

from vime_optim.errors import CheckpointError
from vime_optim.files.pickles import audit
from vime_optim.files.plain import no_archive
from vime_optim.files.safe_load import open_archive, pickle_globals, read_data_pickle

_PICKLE_LIMIT_BYTES = 64 * 1024
"""Largest data.pkl of a single tensor; real ones take about 200 bytes."""

_AUDITED_BYTES = 16 * 1024 * 1024
"""Largest data.pkl that torch's reader may see: subclasses of tensors hold more."""

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

    def tell(self) -> int:
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._length - self._position)
        wanted = left if size is None or size < 0 else min(size, left)
        data = os.pread(self._descriptor, wanted, self._offset + self._position)
        self._position += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


@dataclass(frozen=True)
class _Storage:
    dtype: torch.dtype
    record: str


@dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    offset_elem: int
    shape: tuple[int, ...]
    strides_elem: tuple[int, ...]


class _StorageType:
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


def _rebuild(storage: Any, offset: Any, shape: Any, strides: Any, *_rest: Any) -> _Tensor:
    numbers = (offset, *shape, *strides)
    if not isinstance(storage, _Storage) or any(type(n) is not int or n < 0 for n in numbers):
        raise pickle.UnpicklingError("a tensor with impossible sizes")
    return _Tensor(storage, offset, tuple(shape), tuple(strides))


def _rebuild_v3(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> _Tensor:
    made = _rebuild(storage, offset, shape, strides)
    dtype = rest[2]
    if not isinstance(dtype, torch.dtype):
        raise pickle.UnpicklingError("a tensor without a dtype")
    return _Tensor(_Storage(dtype, made.storage.record), offset, made.shape, made.strides_elem)


def _rebuild_parameter(data: Any, *_rest: Any) -> Any:
    return data


def _allowed() -> dict[str, Any]:
    allowed: dict[str, Any] = {
        "torch._utils._rebuild_tensor_v2": _rebuild,
        "torch._utils._rebuild_tensor_v3": _rebuild_v3,
        "torch._utils._rebuild_parameter": _rebuild_parameter,
        "collections.OrderedDict": OrderedDict,
        "torch.storage.UntypedStorage": _StorageType(torch.uint8),
    }
    for name, value in list(vars(torch).items()):
        if isinstance(value, torch.dtype):
            allowed[f"torch.{name}"] = value
    for dtype, name in torch.storage._dtype_to_storage_type_map().items():
        allowed[f"torch.{name}"] = _StorageType(dtype)
    return allowed


_ALLOWED = _allowed()
_OPCODES = {
    code: method
    for code, method in pickle._Unpickler.dispatch.items()
    if bytes([code])
    not in (pickle.BUILD, pickle.BYTEARRAY8, pickle.INST, pickle.OBJ, pickle.NEXT_BUFFER)
}


class _TensorUnpickler(pickle._Unpickler):
    dispatch = _OPCODES

    def find_class(self, module: str, name: str) -> Any:
        return _ALLOWED[f"{module}.{name}"]

    def persistent_load(self, pid: Any) -> _Storage:
        kind, storage_type, key = pid[0], pid[1], pid[2]
        dtype = storage_type if isinstance(storage_type, torch.dtype) else storage_type.dtype
        if kind != "storage" or not isinstance(dtype, torch.dtype) or type(key) is not str:
            raise pickle.UnpicklingError("a storage of an unknown kind")
        return _Storage(dtype, key)


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
    audit(data)
    for name in pickle_globals(data):
        if name not in _ALLOWED:
            raise ValueError(f"names {name}, which is not part of a tensor")
    tensor = _TensorUnpickler(io.BytesIO(data)).load()
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
    entry = archive.getinfo(f"{root}data/{tensor.storage.record}")
    itemsize = tensor.storage.dtype.itemsize
    extent = _extent(tensor.shape, tensor.strides_elem)
    if (tensor.offset_elem + extent) * itemsize > entry.file_size:
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
    return ItemLayout(tensor.storage.dtype, tensor.shape, start, strides, extent)


def _extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    if len(shape) != len(strides):
        raise ValueError("as many strides as sizes are needed")
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))


def _contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and step != expected:
            return 0 in shape
        expected *= size
    return True


def carrier_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The numpy dtype that carries a torch dtype's bits (numpy has no bfloat16 or float8)."""
    sizes = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}
    return np.dtype(sizes[dtype.itemsize])

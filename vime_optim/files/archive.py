"""The bytes around a tensor's data in a torch.save archive, made without torch.save.

Stored entries, data aligned to 64 bytes, zip64 where sizes need it.
"""

from __future__ import annotations

import functools
import io
import pickle
import struct
import zlib
from collections import OrderedDict
from math import prod
from typing import Any

import torch

from vime_optim.files.geometry import row_major
from vime_optim.files.lazy import LazyValue

ALIGNMENT_BYTES = 64
"""What torch aligns storages to."""

_ZIP64_LIMIT = 0xFFFFFFFF
_SEE_ZIP64 = 0xFFFFFFFF  # in a 32-bit field: the value is in the zip64 record


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether torch stores a tensor as its elements and one of its legacy storage classes."""
    known = type(tensor) in (torch.Tensor, torch.nn.Parameter, LazyValue)
    if not known or tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    return not tensor.is_conj() and not tensor.is_neg() and _storage_type(tensor.dtype) is not None


def _storage_type(dtype: torch.dtype) -> Any:
    name = torch.storage._dtype_to_storage_type_map().get(dtype)
    return getattr(torch, name, None) if name is not None else None


class _StorageToken:
    """Stands for the tensor's storage while its pickle is made."""


class _TensorRecipe:
    """Pickles to the call by which torch rebuilds a contiguous tensor at offset 0."""

    def __init__(self, shape: tuple[int, ...], token: _StorageToken) -> None:
        self.shape = shape
        self.token = token

    def __reduce__(self) -> tuple[Any, ...]:
        hooks: OrderedDict[str, Any] = OrderedDict()
        arguments = (self.token, 0, self.shape, row_major(self.shape), False, hooks)
        return torch._utils._rebuild_tensor_v2, arguments


class _TensorPickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, dtype: torch.dtype, numel: int) -> None:
        super().__init__(file, protocol=2)  # the protocol torch.load's safe unpickler reads
        self._reference = ("storage", _storage_type(dtype), "0", "cpu", numel)

    def persistent_id(self, obj: Any) -> Any:
        return self._reference if isinstance(obj, _StorageToken) else None


@functools.lru_cache(maxsize=1 << 16)  # pickling takes 0.1 ms
def archive_frame(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, bytes]:
    """The bytes of a plain tensor's archive before and after its data."""
    nbytes = prod(shape) * dtype.itemsize
    recipe = io.BytesIO()
    _TensorPickler(recipe, dtype, prod(shape)).dump(_TensorRecipe(shape, _StorageToken()))
    head = bytearray()
    directory = bytearray()
    for name, content in (
        ("archive/data.pkl", recipe.getvalue()),
        ("archive/byteorder", b"little"),
        ("archive/version", b"3\n"),
    ):
        crc = zlib.crc32(content)
        directory += _directory_entry(name, crc, len(content), len(head))
        head += _local_header(name, crc, len(content), padding_bytes=0) + content
    name = "archive/data/0"
    directory += _directory_entry(name, 0, nbytes, len(head))
    bare = len(head) + len(_local_header(name, 0, nbytes, padding_bytes=0))
    # A padding field takes at least its own four-byte header.
    padding = (-(bare + 4) % ALIGNMENT_BYTES) + 4
    head += _local_header(name, 0, nbytes, padding)
    return bytes(head), bytes(directory) + _end_records(4, len(directory), len(head) + nbytes)


def _local_header(name: str, crc: int, nbytes: int, padding_bytes: int) -> bytes:
    padding = b""
    if padding_bytes:
        body = padding_bytes - 4
        padding = struct.pack("<HH", 0x4246, body) + b"Z" * body  # 'FB', as torch pads
    return b"PK\x03\x04" + b"".join(_entry(name, crc, nbytes, padding))


def _directory_entry(name: str, crc: int, nbytes: int, header_offset: int) -> bytes:
    fields, rest = _entry(name, crc, nbytes)
    place = struct.pack("<3H2I", 0, 0, 0, 0, header_offset)
    return b"PK\x01\x02" + fields[:2] + fields + place + rest  # made by the version it needs


def _entry(name: str, crc: int, nbytes: int, padding: bytes = b"") -> tuple[bytes, bytes]:
    """What both records of an entry say: fields of fixed size, and its name with what follows."""
    needed, size, extra = 20, nbytes, padding
    if nbytes >= _ZIP64_LIMIT:
        needed, size = 45, _SEE_ZIP64
        extra = struct.pack("<HHQQ", 1, 16, nbytes, nbytes) + padding
    numbers = (needed, 0x800, 0, 0, 0, crc, size, size, len(name), len(extra))
    return struct.pack("<5H3I2H", *numbers), name.encode() + extra


def _end_records(entries: int, directory_bytes: int, directory_offset: int) -> bytes:
    end = b""
    offset = directory_offset
    if directory_offset >= _ZIP64_LIMIT:
        place = (entries, entries, directory_bytes, directory_offset)
        end += struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, *place)
        end += struct.pack("<4sIQI", b"PK\x06\x07", 0, directory_offset + directory_bytes, 1)
        offset = _SEE_ZIP64
    place = (entries, entries, directory_bytes, offset)
    return end + struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, *place, 0)

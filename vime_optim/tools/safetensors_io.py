"""safetensors files, written and read by parts, so that no tensor need be in memory whole.

Format (huggingface/safetensors, README): eight bytes of header length, little endian; a JSON header
of name -> dtype, shape, data_offsets; then the elements, little endian, row-major, without gaps.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vime_optim.errors import CheckpointError
from vime_optim.files.dcp_metadata import TensorInfo

INDEX_NAME = "state.safetensors.index.json"
INDEX_LIMIT_BYTES = 256 * 1024 * 1024
_HEADER_LIMIT_BYTES = 100_000_000
_NOT_AS_EXPECTED = (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error)

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class StoredTensor(TensorInfo):
    """A tensor in a safetensors file; `start_bytes` counts from the start of the file."""

    name: str
    path: Path
    start_bytes: int


def header_bytes(tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """The start of a file that holds these tensors in this order, elements not included."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        entry = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        header[name] = entry
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file; every size is held against the file's length.

    Raises:
        CheckpointError: not a safetensors file, truncated, or hostile.
    """
    try:
        _require_plain(path)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size - 8, _HEADER_LIMIT_BYTES):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(file.read(length))
        tensors = {}
        for name, entry in header.items():
            if name != "__metadata__":
                tensors[name] = _stored(path, name, entry, 8 + length, size)
        return tensors
    except (OSError, *_NOT_AS_EXPECTED) as error:
        raise _broken(path, error) from error


def _require_plain(path: Path) -> None:
    """Raises ValueError for links, pipes and folders."""
    if path.is_symlink() or not path.is_file():
        raise ValueError("no plain file" if os.path.lexists(path) else "there is no such file")


def _stored(path: Path, name: str, entry: Any, base: int, size: int) -> StoredTensor:
    start, stop = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if any(type(n) is not int or n < 0 for n in (start, stop, *shape)):
        raise ValueError(f"sizes of {name[:100]!r}")
    made = StoredTensor(_DTYPES[entry["dtype"]], shape, name, path, base + start)
    if made.size_bytes != stop - start or base + stop > size:
        raise ValueError(f"{name[:100]!r} does not fit its place")
    return made


def _broken(path: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        "This is not a whole safetensors file.",
        where=str(path),
        got=f"{type(error).__name__}: {error}"[:200],
        next_step="Export again; an interrupted export resumes where it stopped.",
    )


def read_index(folder: Path) -> dict[str, Any]:
    """The index of an export: {"metadata": {...}, "weight_map": {name: file}}.

    Raises:
        CheckpointError: missing, not JSON, or naming files outside the folder.
    """
    path = folder / INDEX_NAME
    try:
        _require_plain(path)
        if path.stat().st_size > INDEX_LIMIT_BYTES:
            raise ValueError(f"{path.stat().st_size} bytes")
        index = json.loads(path.read_bytes())
        names = set(index["weight_map"].values())
        if any(Path(name).name != name or "\\" in name for name in names):
            raise ValueError("a file outside the folder")
        index.setdefault("metadata", {}).keys()  # a dict, or an AttributeError
    except (OSError, *_NOT_AS_EXPECTED) as error:
        raise CheckpointError(
            "This is not a finished export.",
            where=str(path),
            got=f"{type(error).__name__}: {error}"[:200],
            expected="the output of `vime-optim export`, or the same layout by another tool",
            next_step="Run the export again; it resumes where it stopped.",
        ) from error
    return dict(index)


def open_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of an export by name, in the order of the index."""
    index = read_index(folder)
    files: dict[str, dict[str, StoredTensor]] = {}
    found = {}
    for name, file in index["weight_map"].items():
        if file not in files:
            files[file] = read_header(folder / file)
        if name not in files[file]:
            raise _broken(folder / file, KeyError(name))
        found[name] = files[file][name]
    return found


def read_range(tensor: StoredTensor, start_elem: int, stop_elem: int) -> torch.Tensor:
    """Elements [start, stop) of the flat tensor, as a new 1-dim tensor."""
    made = torch.empty(stop_elem - start_elem, dtype=tensor.dtype)
    if made.numel() == 0:
        return made
    buffer = memoryview(made.view(torch.uint8).numpy().data).cast("B")
    with tensor.path.open("rb") as file:
        file.seek(tensor.start_bytes + start_elem * tensor.dtype.itemsize)
        if file.readinto(buffer) != len(buffer):
            raise _broken(tensor.path, ValueError("the file ends early"))
    return made


def load_safetensors(
    folder: str | os.PathLike[str], names: Sequence[str] | None = None
) -> dict[str, torch.Tensor]:
    """Reads an export back.

    Args:
        folder: what `vime-optim export` wrote.
        names: only these; all when left out.

    Returns:
        CPU tensors by canonical name, e.g. `optimizer.state.exp_avg.<model key>`.

    Raises:
        CheckpointError: the export is unfinished or damaged, or lacks a name.
    """
    stored = open_tensors(Path(folder))
    missing = [name for name in names or () if name not in stored]
    if missing:
        raise CheckpointError("The export lacks a tensor.", where=str(folder), got=missing[0])
    chosen = stored if names is None else {name: stored[name] for name in names}
    return {
        name: read_range(tensor, 0, tensor.numel).reshape(tensor.shape)
        for name, tensor in chosen.items()
    }

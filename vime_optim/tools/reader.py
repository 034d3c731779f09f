"""Opens a Megatron torch_dist checkpoint directory and reads its tensors by parts.

Nothing is executed, nothing outside the directory is opened, and nothing is allocated before its
declared size has been held against the size of the file that should contain it.
"""

from __future__ import annotations

import copy
import json
import math
import os
import stat
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np

from vime_optim.errors import CheckpointError
from vime_optim.files.boxes import Box, box_shape, cover_fault, intersect
from vime_optim.files.dcp_metadata import (
    Chunk,
    Index,
    Location,
    TensorEntry,
    parse_metadata,
)
from vime_optim.files.items import FileWindow, ItemLayout, carrier_dtype, read_layout
from vime_optim.files.safe_load import load_common
from vime_optim.tools.place import checkpoint_directory, describe, refuse_plain_dcp

METADATA_LIMIT_BYTES = 512 * 1024 * 1024
CONFIG_LIMIT_BYTES = 1024 * 1024
COMMON_STATE_KEY = "common_state/shard_0_1"
"""Where megatron-core 0.19 keeps what common.pt held before (its serialization.py)."""

_OPEN_FILES = 128


class Checkpoint:
    """A checkpoint directory, open for reading. Use as a context manager.

    Attributes:
        path: the directory.
        config: metadata.json, or None where it is missing.
        index: what `.metadata` says.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = checkpoint_directory(path)
        self._descriptors: OrderedDict[str, int] = OrderedDict()
        self._layouts: dict[tuple[str, tuple[int, ...]], ItemLayout] = {}
        self._sorted_key: str | None = None
        self._covered: set[str] = set()
        self._common: Any = None
        self.config = self._read_config()
        self.index: Index = self._read_index()
        has_common = COMMON_STATE_KEY in self.index.objects or (self.path / "common.pt").exists()
        if self.config is None and not has_common:
            refuse_plain_dcp(self.path)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files; the object must not be read from any more."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def clone(self) -> Checkpoint:
        """The same checkpoint with files of its own, for another thread; close it too."""
        other = copy.copy(self)
        other._descriptors = OrderedDict()
        other._sorted_key = None
        return other

    @property
    def tensors(self) -> dict[str, TensorEntry]:
        return self.index.tensors

    @property
    def objects(self) -> dict[str, Location | None]:
        return self.index.objects

    # -- small files

    def _read_small(self, name: str, limit_bytes: int) -> bytes | None:
        path = self.path / name
        if not path.exists() and not path.is_symlink():
            return None
        descriptor = self.open_file(name)
        size = os.fstat(descriptor).st_size
        if size > limit_bytes:
            raise CheckpointError(
                "A file of the checkpoint is too large for what it should hold.",
                where=str(path),
                got=f"{size} bytes",
                expected=f"at most {limit_bytes} bytes",
                next_step="Check that this directory is a Megatron checkpoint.",
            )
        return FileWindow(descriptor, 0, size).read()

    def _read_config(self) -> dict[str, Any] | None:
        data = self._read_small("metadata.json", CONFIG_LIMIT_BYTES)
        if data is None:
            return None
        try:
            config = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                "metadata.json is not JSON.",
                where=str(self.path / "metadata.json"),
                got=str(error)[:200],
                next_step="Remove it in a copy and run `vime-optim repair`, which rebuilds it.",
            ) from error
        if not isinstance(config, dict):
            raise CheckpointError(
                "metadata.json does not describe a checkpoint.",
                where=str(self.path / "metadata.json"),
                got=type(config).__name__,
                expected="an object with sharded_backend",
            )
        return config

    def _read_index(self) -> Index:
        backend = (self.config or {}).get("sharded_backend", "torch_dist")
        data = self._read_small(".metadata", METADATA_LIMIT_BYTES)
        if backend != "torch_dist" or data is None:
            found, next_step = describe(self.path)
            raise CheckpointError(
                "This directory is not a torch_dist checkpoint of Megatron.",
                where=str(self.path),
                got=f"backend {str(backend)[:60]!r}" if backend != "torch_dist" else found,
                expected="a directory with .metadata, .distcp files and common.pt or common_state",
                next_step=next_step,
            )
        return parse_metadata(data)

    # -- files and items

    def open_file(self, name: str) -> int:
        """Descriptor of a plain file directly in the directory; links are refused."""
        if name in self._descriptors:
            self._descriptors.move_to_end(name)
            return self._descriptors[name]
        plain = name not in ("", ".", "..") and not any(c in name for c in "/\\\0")
        try:
            if not plain:
                raise OSError("the name leads out of the directory")
            flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
            descriptor = os.open(self.path / name, flags)
        except OSError as error:
            raise CheckpointError(
                "A file that the checkpoint names cannot be used.",
                where=f"{self.path}: {name[:200]!r}",
                got=error.strerror or str(error),
                expected="a plain file directly in the checkpoint directory, not a link",
                next_step="Copy the missing files from the source of the checkpoint.",
            ) from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise CheckpointError(
                "A file that the checkpoint names is not a plain file.",
                where=str(self.path / name),
                next_step="Do not load this checkpoint before you know who wrote it.",
            )
        if hasattr(os, "posix_fadvise"):  # tensors are read in the order of the file
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        self._descriptors[name] = descriptor
        if len(self._descriptors) > _OPEN_FILES:
            os.close(self._descriptors.popitem(last=False)[1])
        return descriptor

    def _window(self, key: str, location: Location | None) -> tuple[FileWindow, Location]:
        if location is None:
            raise CheckpointError(
                "The checkpoint names an item but not where it is stored.",
                where=f"{self.path}: {key[:200]}",
                next_step="The save did not finish, or .metadata is damaged; use another one.",
            )
        descriptor = self.open_file(location.file)
        size = os.fstat(descriptor).st_size
        if location.offset_bytes + location.length_bytes > size:
            raise CheckpointError(
                "A file of the checkpoint is shorter than .metadata says.",
                where=f"{self.path / location.file}: {key[:200]}",
                got=f"{size} bytes",
                expected=f"at least {location.offset_bytes + location.length_bytes} bytes",
                next_step="Copy the file again from its source; a truncated tensor is lost.",
            )
        return FileWindow(descriptor, location.offset_bytes, location.length_bytes), location

    def read_object(self, key: str) -> Any:
        """A sharded object (or 0.19's common state) by its unique key, loaded under weights_only.

        DCP holds Megatron's objects as lists of one (one entry a replica); the object itself comes
        back.
        """
        window, location = self._window(key, self.objects.get(key))
        where = f"{self.path / location.file}: {key[:200]}"
        if location.length_bytes > CONFIG_LIMIT_BYTES * 256:
            raise CheckpointError(
                "An object of the checkpoint is too large to be one.",
                where=where,
                got=f"{location.length_bytes} bytes",
            )
        loaded = load_common(window.read(), where=where, keep_unknown_classes=True)
        return loaded[0] if isinstance(loaded, list) and len(loaded) == 1 else loaded

    def common_state(self) -> dict[Any, Any]:
        """What is common to all ranks: from common.pt, or from the DCP item of 0.19."""
        if self._common is None:
            data = self._read_small("common.pt", 256 * CONFIG_LIMIT_BYTES)
            if data is not None:
                self._common = load_common(
                    data, where=str(self.path / "common.pt"), keep_unknown_classes=True
                )
            elif COMMON_STATE_KEY in self.objects:
                self._common = self.read_object(COMMON_STATE_KEY)
            else:
                raise CheckpointError(
                    "The checkpoint has no common state.",
                    where=str(self.path),
                    expected="common.pt, or the item common_state of megatron-core 0.19",
                    next_step="Copy common.pt from the source; rank 0 writes it.",
                )
        if not isinstance(self._common, dict):
            raise CheckpointError(
                "The common state is not a dictionary.",
                where=str(self.path),
                got=type(self._common).__name__,
            )
        return self._common

    # -- tensors

    def layout(self, entry: TensorEntry, chunk: Chunk) -> ItemLayout:
        """Where a chunk's elements are; checked against what `.metadata` says of it."""
        known = self._layouts.get((entry.key, chunk.offsets))
        if known is not None:
            return known
        window, place = self._window(entry.key, chunk.location)
        where = f"{self.path / place.file}: {entry.key[:200]}"
        found = read_layout(window, place.offset_bytes, place.length_bytes, where)
        if found.dtype != entry.dtype or found.shape != chunk.sizes:
            raise CheckpointError(
                "A chunk holds something else than .metadata says.",
                where=where,
                got=f"{found.dtype} {found.shape}",
                expected=f"{entry.dtype} {chunk.sizes}",
                next_step="The files are of two different saves; use a whole checkpoint.",
            )
        if len(self._layouts) < 200_000:
            self._layouts[entry.key, chunk.offsets] = found
        return found

    def read_box(
        self, entry: TensorEntry, box: Box, out: np.ndarray[Any, Any] | None = None
    ) -> np.ndarray[Any, Any]:
        """The elements of a box, as raw bits (bfloat16 as uint16, float32 as uint32).

        Args:
            box: one of `tiles`, in the tensor's coordinates.
            out: a flat buffer of the carrier dtype to fill; allocated when left out.

        Raises:
            CheckpointError: the chunks leave a gap in the box, or cannot be read.
        """
        self.check_cover(entry)
        shape = box_shape(box)
        numel = math.prod(shape)
        flat = np.empty(numel, carrier_dtype(entry.dtype)) if out is None else out[:numel]
        target = flat.reshape(shape)
        for chunk in self.chunks_in(entry, box):
            part = intersect(chunk, box)
            if part is None:
                continue
            where = tuple(
                slice(a - start, b - start) for (a, b), (start, _) in zip(part, box, strict=True)
            )
            view = target[where] if where else target
            self._fill(entry, chunk, part, view)
        return target

    def check_cover(self, entry: TensorEntry) -> None:
        """Raises CheckpointError unless the chunks hold every element of the tensor once."""
        if entry.key not in self._covered:
            fault = cover_fault(entry)
            if fault is not None:
                raise CheckpointError(
                    "The chunks of a tensor do not hold each of its elements once.",
                    where=f"{self.path}: {entry.key[:200]}",
                    got=fault,
                    next_step="Run `vime-optim inspect`; nothing missing is filled with zeros.",
                )
            self._covered.add(entry.key)

    def chunks_in(self, entry: TensorEntry, box: Box) -> Iterator[Chunk]:
        """The chunks that may meet a box."""
        if len(entry.shape) == 1 and len(entry.chunks) > 16:
            starts, ordered = self._sorted_chunks(entry)
            first = max(0, int(np.searchsorted(starts, box[0][0], side="right")) - 1)
            last = int(np.searchsorted(starts, box[0][1], side="left"))
            # Empty chunks share their start with the next one: step back over equal starts.
            while first > 0 and starts[first - 1] == starts[first]:
                first -= 1
            yield from ordered[first:last]
        else:
            yield from entry.chunks

    def _sorted_chunks(self, entry: TensorEntry) -> tuple[np.ndarray[Any, Any], list[Chunk]]:
        if self._sorted_key != entry.key:
            ordered = sorted(entry.chunks, key=lambda c: (c.offsets[0], c.sizes[0]))
            self._sorted_key = entry.key
            self._sorted = (np.array([c.offsets[0] for c in ordered], dtype=np.int64), ordered)
        return self._sorted

    def _fill(
        self, entry: TensorEntry, chunk: Chunk, part: Box, view: np.ndarray[Any, Any]
    ) -> None:
        layout = self.layout(entry, chunk)
        local = tuple((a - o, b - o) for (a, b), o in zip(part, chunk.offsets, strict=True))
        place = chunk.location
        if place is None:
            raise CheckpointError("A chunk has no location.", where=entry.key[:200])
        strides = layout.strides_elem or _row_major(chunk.sizes)
        start = sum(a * step for (a, _), step in zip(local, strides, strict=True))
        extent = 1 + sum((b - a - 1) * step for (a, b), step in zip(local, strides, strict=True))
        itemsize = view.dtype.itemsize
        descriptor = self.open_file(place.file)
        at = layout.start_bytes + start * itemsize
        if extent == view.size and layout.strides_elem is None and view.flags.c_contiguous:
            _read_into(descriptor, at, view.reshape(-1), entry.key)
            return
        if extent > 2 * view.size + 4096:
            self._fill_by_rows(entry, chunk, part, view)
            return
        raw = np.empty(extent, view.dtype)
        _read_into(descriptor, at, raw, entry.key)
        byte_strides = [step * itemsize for step in strides]
        view[...] = np.lib.stride_tricks.as_strided(raw, view.shape, byte_strides, writeable=False)

    def _fill_by_rows(
        self, entry: TensorEntry, chunk: Chunk, part: Box, view: np.ndarray[Any, Any]
    ) -> None:
        """A part that lies scattered in its chunk: one read for each index of the first axis."""
        axis = next(i for i, (a, b) in enumerate(part) if b - a > 1)
        for row in range(part[axis][1] - part[axis][0]):
            at = part[axis][0] + row
            sub = (*part[:axis], (at, at + 1), *part[axis + 1 :])
            index = (*(slice(None),) * axis, slice(row, row + 1))
            self._fill(entry, chunk, sub, view[index])


def _row_major(sizes: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _read_into(descriptor: int, offset: int, flat: np.ndarray[Any, Any], key: str) -> None:
    buffer = memoryview(flat.view(np.uint8).data).cast("B")
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], offset + done)
        if count <= 0:
            raise CheckpointError(
                "A file of the checkpoint ends before its tensor does.", where=key[:200]
            )
        done += count

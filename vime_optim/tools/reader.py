"""Opens a Megatron torch_dist checkpoint directory and reads its tensors by parts.

Nothing is executed, nothing outside the directory is opened, and nothing is allocated before its
declared size has been held against the size of the file that should contain it.
"""

from __future__ import annotations

import copy
import json
import os
import stat
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from vime_optim.errors import CheckpointError
from vime_optim.files.dcp_metadata import Chunk, Index, Location, TensorEntry, parse_metadata
from vime_optim.files.filling import Source, fill
from vime_optim.files.geometry import Box, row_major
from vime_optim.files.items import FileWindow, ItemLayout, carrier_dtype, read_layout
from vime_optim.files.plain import too_large
from vime_optim.files.safe_load import load_common
from vime_optim.tools.place import checkpoint_directory, describe, refuse_plain_dcp

METADATA_LIMIT_BYTES = 512 * 1024 * 1024
CONFIG_LIMIT_BYTES = 1024 * 1024
COMMON_STATE_KEY = "common_state/shard_0_1"
"""Where megatron-core 0.19 keeps what common.pt held before (its serialization.py)."""

_OPEN_FILES = 128

Bits = np.ndarray[Any, Any]
"""Elements as unsigned integers of their size: numpy has no bfloat16 or float8."""


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
            raise too_large(str(path), str(size), limit_bytes)
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
        known = self._layouts.get((entry.key, chunk.offset))
        if known is not None:
            return known
        window, place = self._window(entry.key, chunk.location)
        where = f"{self.path / place.file}: {entry.key[:200]}"
        found = read_layout(window, place.offset_bytes, place.length_bytes, where)
        if found.dtype != entry.dtype or found.shape != chunk.size:
            raise CheckpointError(
                "A chunk holds something else than .metadata says.",
                where=where,
                got=f"{found.dtype} {found.shape}",
                expected=f"{entry.dtype} {chunk.size}",
                next_step="The files are of two different saves; use a whole checkpoint.",
            )
        if len(self._layouts) < 200_000:
            self._layouts[entry.key, chunk.offset] = found
        return found

    def read_box(self, entry: TensorEntry, box: Box, out: Bits | None = None) -> Bits:
        """The elements of a box, as raw bits (bfloat16 as uint16, float32 as uint32).

        Args:
            out: a flat buffer of the carrier dtype to fill; allocated when left out.

        Raises:
            CheckpointError: the chunks leave a gap in the tensor, or cannot be read.
        """
        self.check_cover(entry)
        flat = np.empty(box.numel, carrier_dtype(entry.dtype)) if out is None else out[: box.numel]
        target = flat.reshape(box.size)
        for chunk in self._chunks_near(entry, box):
            part = chunk.meet(box)
            if part is not None:
                view = part.seen_from(box.offset).part_of(target)
                self._fill(entry, chunk, part.seen_from(chunk.offset), view)
        return target

    def check_cover(self, entry: TensorEntry) -> None:
        """Raises CheckpointError unless the chunks hold every element of the tensor once."""
        if entry.key not in self._covered:
            fault = entry.cover_fault()
            if fault is not None:
                raise CheckpointError(
                    "The chunks of a tensor do not hold each of its elements once.",
                    where=f"{self.path}: {entry.key[:200]}",
                    got=fault,
                    next_step="Run `vime-optim inspect`; nothing missing is filled with zeros.",
                )
            self._covered.add(entry.key)

    def _chunks_near(self, entry: TensorEntry, box: Box) -> Sequence[Chunk]:
        """The chunks that may meet a box. Flat tensors may have one for each rank."""
        if len(entry.shape) != 1 or len(entry.chunks) <= 16:
            return entry.chunks
        if self._sorted_key != entry.key:
            self._sorted_key = entry.key
            self._sorted = sorted(entry.chunks, key=lambda c: (c.offset, c.size))
        start, end = box.offset[0], box.offset[0] + box.size[0]
        # They hold every element once, so their ends ascend as well.
        first = bisect_right(self._sorted, start, key=lambda c: c.offset[0] + c.size[0])
        return self._sorted[first : bisect_left(self._sorted, end, key=lambda c: c.offset[0])]

    def _fill(self, entry: TensorEntry, chunk: Chunk, box: Box, view: Bits) -> None:
        """Reads a box of a chunk, in the chunk's coordinates, into a part of an array."""
        layout = self.layout(entry, chunk)
        assert chunk.location is not None  # or it had no layout
        path = self.path / chunk.location.file
        strides = layout.strides_elem or row_major(chunk.size)
        # Axes in the order in which they lie in the file: a transposed tensor is turned afterwards.
        order = sorted(range(len(strides)), key=strides.__getitem__, reverse=True)
        stored = Box(*(tuple(n[axis] for axis in order) for n in (box.offset, box.size)))
        turned = view.transpose(order)
        raw = turned if turned.flags.c_contiguous else np.empty(stored.size, view.dtype)
        source = Source(
            str(path), entry.key[:200], layout.dtype, layout.start_bytes, (), (), stored.size
        )
        fill(
            self.open_file(chunk.location.file),
            source,
            [strides[axis] for axis in order],
            stored,
            raw.reshape(-1).view(np.uint8).data,
        )
        if raw is not turned:
            turned[...] = raw

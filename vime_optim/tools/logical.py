"""A checkpoint's tensors by canonical name, whatever format holds them.

`open_view` maps names such as `optimizer.state.exp_avg.decoder.final_layernorm.weight` to what
stores them: a DCP tensor as it is, or slices of dp_reshardable's flat buckets where their layout
could be proved (bucket_layout.py). Buckets without a proved layout keep their own names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vime_optim.files.boxes import Box, box_shape, tiles
from vime_optim.files.dcp_metadata import TensorEntry
from vime_optim.files.items import carrier_dtype
from vime_optim.tools.bucket_layout import BucketLayout, derive_layout
from vime_optim.tools.names import BucketKey, ModelSpaceKey, parse_key
from vime_optim.tools.reader import Checkpoint

MODEL, OPTIMIZER, BUCKET = "model", "optimizer", "bucket"


@dataclass(frozen=True)
class Piece:
    """A box of a logical tensor that lies flat in a bucket from `start` on."""

    box: Box
    bucket: TensorEntry
    start: int


@dataclass(frozen=True)
class Logical:
    """A tensor by its canonical name. Either `entry` or `pieces` says where it is."""

    name: str
    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    entry: TensorEntry | None = None
    pieces: tuple[Piece, ...] = ()

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
class View:
    """The logical tensors of an open checkpoint.

    Attributes:
        tensors: by canonical name.
        layout_problem: why the buckets have no proved layout; None where they have one or where
            there are none.
    """

    checkpoint: Checkpoint
    tensors: dict[str, Logical] = field(default_factory=dict)
    layout_problem: str | None = None

    def read(
        self, tensor: Logical, box: Box, out: np.ndarray[Any, Any] | None = None
    ) -> np.ndarray[Any, Any]:
        """Raw bits of a contiguous box (one of `tiles`), in the carrier dtype."""
        if tensor.entry is not None:
            return self.checkpoint.read_box(tensor.entry, box, out)
        shape = box_shape(box)
        numel = int(np.prod(shape, dtype=np.int64))
        flat = np.empty(numel, carrier_dtype(tensor.dtype)) if out is None else out[:numel]
        target = flat.reshape(shape)
        for piece in tensor.pieces:
            self._copy_piece(piece, box, target)
        return target

    def _copy_piece(self, piece: Piece, box: Box, target: np.ndarray[Any, Any]) -> None:
        part = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, piece.box, strict=True))
        if any(a >= b for a, b in part):
            return
        strides, step = [], 1
        for start, stop in reversed(piece.box):
            strides.append(step)
            step *= stop - start
        strides.reverse()
        first = last = piece.start
        for (a, b), (c, _), step in zip(part, piece.box, strides, strict=True):
            first += (a - c) * step
            last += (b - 1 - c) * step
        values = self.checkpoint.read_box(piece.bucket, ((first, last + 1),))
        sizes = box_shape(part)
        byte_strides = [step * values.itemsize for step in strides]
        shaped = np.lib.stride_tricks.as_strided(values, sizes, byte_strides, writeable=False)
        where = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(part, box, strict=True))
        target[where] = shaped

    def read_whole(self, tensor: Logical) -> np.ndarray[Any, Any]:
        """All of a small tensor."""
        box: Box = tuple((0, size) for size in tensor.shape)
        return self.read(tensor, box)

    def stream(self, tensor: Logical, block_bytes: int) -> Iterator[np.ndarray[Any, Any]]:
        """The tensor's raw bits in flat order, in blocks of at most `block_bytes`."""
        limit = max(1, block_bytes // tensor.dtype.itemsize)
        for box in tiles(tensor.shape, limit):
            yield self.read(tensor, box).reshape(-1)


def open_view(checkpoint: Checkpoint, *, prove_layout: bool = True) -> View:
    """The logical tensors of a checkpoint.

    Args:
        prove_layout: try to find the parameters in dp_reshardable's buckets (reads the model's
            weights and the masters once).
    """
    view = View(checkpoint)
    buckets: dict[str, BucketKey] = {}
    for key, entry in checkpoint.tensors.items():
        meaning = parse_key(key)
        if isinstance(meaning, BucketKey):
            buckets[key] = meaning
        elif isinstance(meaning, ModelSpaceKey):
            name = meaning.canonical
            name = key if name in view.tensors else name
            view.tensors[name] = Logical(name, OPTIMIZER, entry.dtype, entry.shape, entry)
        else:
            view.tensors[key] = Logical(key, MODEL, entry.dtype, entry.shape, entry)
    if buckets and prove_layout:
        layout = derive_layout(checkpoint, buckets)
        if isinstance(layout, BucketLayout):
            _add_pieces(view, layout)
            return view
        view.layout_problem = layout
    elif buckets:
        view.layout_problem = "the layout of the buckets was not looked for"
    for key in buckets:
        entry = checkpoint.tensors[key]
        view.tensors[key] = Logical(key, BUCKET, entry.dtype, entry.shape, entry)
    return view


def _add_pieces(view: View, layout: BucketLayout) -> None:
    for model_key, places in layout.places.items():
        shape = view.checkpoint.tensors[model_key].shape
        for state in layout.states:
            pieces = tuple(
                Piece(place.box, view.checkpoint.tensors[place.stem + state], place.start)
                for place in places
            )
            name = f"optimizer.state.{state}.{model_key}"
            dtype = pieces[0].bucket.dtype
            view.tensors[name] = Logical(name, OPTIMIZER, dtype, shape, None, pieces)

"""A checkpoint's tensors by canonical name, whatever format holds them.

`open_view` maps names such as `optimizer.state.exp_avg.decoder.final_layernorm.weight` to what
stores them: a DCP tensor as it is, or slices of dp_reshardable's flat buckets where their layout
could be proved (bucket_layout.py). Buckets without a proved layout keep their own names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from vime_optim.files.dcp_metadata import TensorEntry, TensorInfo
from vime_optim.files.geometry import Box, row_major, tiles
from vime_optim.files.items import carrier_dtype
from vime_optim.tools.bucket_layout import BucketLayout, derive_layout
from vime_optim.tools.names import BucketKey, ModelSpaceKey, parse_key
from vime_optim.tools.reader import Bits, Checkpoint

MODEL, OPTIMIZER, BUCKET = "model", "optimizer", "bucket"


@dataclass(frozen=True)
class BucketPart:
    """A box of a logical tensor that lies flat in a bucket from `start` on."""

    box: Box
    bucket: TensorEntry
    start: int


@dataclass(frozen=True)
class Logical(TensorInfo):
    """A tensor by its canonical name. Either `entry` or `parts` says where it is."""

    name: str
    kind: str
    entry: TensorEntry | None = None
    parts: tuple[BucketPart, ...] = ()


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

    def read(self, tensor: Logical, box: Box, out: Bits | None = None) -> Bits:
        """Raw bits of a box, in the carrier dtype; into `out`, a flat buffer, where it is given."""
        if tensor.entry is not None:
            return self.checkpoint.read_box(tensor.entry, box, out)
        flat = np.empty(box.numel, carrier_dtype(tensor.dtype)) if out is None else out[: box.numel]
        target = flat.reshape(box.size)
        for part in tensor.parts:
            met = part.box.meet(box)
            if met is not None:
                self._read_part(part, met, met.seen_from(box.offset).part_of(target))
        return target

    def _read_part(self, part: BucketPart, box: Box, target: Bits) -> None:
        """Reads what lies between the first element and the last one, and takes the box of it."""
        strides = row_major(part.box.size)
        local = box.seen_from(part.box.offset)
        first = part.start + sum(o * step for o, step in zip(local.offset, strides, strict=True))
        extent = 1 + sum((n - 1) * step for n, step in zip(local.size, strides, strict=True))
        values = self.checkpoint.read_box(part.bucket, Box((first,), (extent,)))
        steps = [step * values.itemsize for step in strides]
        target[...] = np.lib.stride_tricks.as_strided(values, box.size, steps, writeable=False)

    def stream(self, tensor: Logical, block_bytes: int) -> Iterator[Bits]:
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
            view.tensors[name] = Logical(entry.dtype, entry.shape, name, OPTIMIZER, entry)
        else:
            view.tensors[key] = Logical(entry.dtype, entry.shape, key, MODEL, entry)
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
        view.tensors[key] = Logical(entry.dtype, entry.shape, key, BUCKET, entry)
    return view


def _add_pieces(view: View, layout: BucketLayout) -> None:
    for model_key, places in layout.places.items():
        shape = view.checkpoint.tensors[model_key].shape
        for state in layout.states:
            parts = tuple(
                BucketPart(place.box, view.checkpoint.tensors[place.stem + state], place.start)
                for place in places
            )
            name = f"optimizer.state.{state}.{model_key}"
            dtype = parts[0].bucket.dtype
            view.tensors[name] = Logical(dtype, shape, name, OPTIMIZER, None, parts)

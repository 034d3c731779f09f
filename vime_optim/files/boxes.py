"""Boxes of a tensor: cutting it up, meeting chunks, and whether the chunks cover it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from vime_optim.files.cover import find_fault
from vime_optim.files.dcp_metadata import Chunk, TensorEntry

Box = tuple[tuple[int, int], ...]
"""Half-open (start, stop) per dimension."""


def tiles(shape: tuple[int, ...], limit_elem: int) -> Iterator[Box]:
    """Cuts a tensor into contiguous boxes of at most `limit_elem` elements, in order."""
    if 0 in shape:
        return
    inner = 1
    cut = len(shape)
    while cut > 0 and inner * shape[cut - 1] <= limit_elem:
        cut -= 1
        inner *= shape[cut]
    tail: Box = tuple((0, size) for size in shape[cut:])
    if cut == 0:
        yield tail
        return
    axis = cut - 1
    step = max(1, limit_elem // inner)
    for index in np.ndindex(*shape[:axis]):
        lead: Box = tuple((int(i), int(i) + 1) for i in index)
        for start in range(0, shape[axis], step):
            yield (*lead, (start, min(start + step, shape[axis])), *tail)


def intersect(chunk: Chunk, box: Box) -> Box | None:
    """The part of a box that a chunk holds, in the tensor's coordinates."""
    if box:
        start, stop = box[0]  # most chunks of a large tensor are out of reach on the first axis
        first = chunk.offsets[0]
        if first >= stop or first + chunk.sizes[0] <= start:
            return None
    part = tuple(
        (max(start, offset), min(stop, offset + size))
        for (start, stop), offset, size in zip(box, chunk.offsets, chunk.sizes, strict=True)
    )
    return part if all(start < stop for start, stop in part) else None


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def cover_fault(entry: TensorEntry) -> str | None:
    """What is wrong with a tensor's cover by its chunks, in words; None where nothing is."""
    if not entry.shape:
        held = len(entry.chunks)
        return None if held == 1 else f"{held} chunks of a single number"
    lo = np.array([c.offsets for c in entry.chunks], dtype=np.int64).reshape(-1, len(entry.shape))
    hi = lo + np.array([c.sizes for c in entry.chunks], dtype=np.int64).reshape(lo.shape)
    fault = find_fault(lo, hi, entry.shape, full=True)
    if fault is None:
        return None
    what = "held twice" if fault.boxes else "held by no chunk"
    return f"the part at {fault.offset} of size {fault.size} is {what}"

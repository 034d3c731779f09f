"""Where the elements of a box lie in a stored chunk: pure integers, no torch, no files.

A checkpoint stores chunks, contiguous in row-major order; a rank wants a box of one. The box is cut
into pieces of bounded size, and a piece is a comb: runs of contiguous elements at equal distances.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod


@dataclass(frozen=True, slots=True)
class Comb:
    """`count` runs of `run` contiguous elements; their starts lie `step` elements apart.

    Attributes:
        start: first element of the first run, within the flat chunk.
        run: elements of each run.
        count: runs.
        step: elements from the start of one run to that of the next.
    """

    start: int
    run: int
    count: int
    step: int

    @property
    def numel(self) -> int:
        """Elements of all runs, gaps not counted."""
        return self.run * self.count


def combs(shape: Sequence[int], offset: Sequence[int], size: Sequence[int]) -> Iterator[Comb]:
    """The elements of a box of a row-major chunk, in the box's own row-major order.

    Args:
        shape: the chunk's shape.
        offset: the box's first index along each axis.
        size: the box's length along each axis; offset + size must lie within the shape.
    """
    if not prod(size):
        return
    strides = _strides(shape)
    # Axes after `axis` are taken whole, so that everything from `axis` on is one run.
    axis = len(shape) - 1
    while axis > 0 and size[axis] == shape[axis]:
        axis -= 1
    axis = max(axis, 0)
    run = prod(size[axis:])
    start = sum(o * stride for o, stride in zip(offset, strides, strict=True))
    # Axes of length one need no loop; the innermost other one is the comb's.
    outer = [a for a in range(axis) if size[a] > 1]
    if not outer:
        yield Comb(start, run, 1, run)
        return
    teeth = outer.pop()
    for index in product(*(range(size[a]) for a in outer)):
        at = start + sum(i * strides[a] for i, a in zip(index, outer, strict=True))
        yield Comb(at, run, size[teeth], strides[teeth])


def cut(size: Sequence[int], limit_numel: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cuts a box into boxes of at most `limit_numel` elements (at least 1): (offset, size) of each.

    They come in row-major order, and each is contiguous in the box's own row-major order.
    """
    size = tuple(size)
    numel = prod(size)
    if not numel:
        return
    if numel <= limit_numel:
        yield (0,) * len(size), size
        return
    axis = next(a for a, length in enumerate(size) if length > 1)
    row = numel // size[axis]
    rows = max(1, limit_numel // row)
    lead = (0,) * axis
    for first in range(0, size[axis], rows):
        part = (*size[:axis], min(rows, size[axis] - first), *size[axis + 1 :])
        if row <= limit_numel:
            yield (*lead, first, *(0,) * (len(size) - axis - 1)), part
            continue
        for offset, inner in cut(part, limit_numel):
            yield (*lead, first, *offset[axis + 1 :]), inner


def _strides(shape: Sequence[int]) -> list[int]:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return strides

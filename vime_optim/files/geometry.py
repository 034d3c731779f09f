"""Half-open boxes of row-major tensors, as values: pure integers, no torch, no files.

Megatron's distributed optimizer cuts its buffers by element count, so a rank owns a flat range of a
parameter that need not end at a row. A checkpoint addresses boxes, stores chunks (boxes, too), and
is read by ranks that want other boxes. Here ranges are cut into boxes, boxes into smaller ones, and
a box of a chunk into combs: runs of contiguous elements at equal distances.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from vime_optim.errors import PlanError

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A half-open box of a tensor: `offset`, its first index along each axis, and its `size`."""

    offset: Ints
    size: Ints

    @property
    def numel(self) -> int:
        """Elements in the box; 1 where there are no axes."""
        return prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        """What indexes the box in an array or tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.size, strict=True))

    def part_of(self, array: Any) -> Any:
        """The view of an array or tensor, whole in the box's coordinates, that the box holds."""
        return array[self.slices] if self.size else array

    def __str__(self) -> str:
        return "[" + ", ".join(f"{s.start}:{s.stop}" for s in self.slices) + "]"

    def is_within(self, shape: Sequence[int]) -> bool:
        """Whether the box has as many axes as `shape` and lies inside it."""
        return len(self.offset) == len(self.size) == len(shape) and all(
            o >= 0 and n >= 0 and o + n <= whole
            for o, n, whole in zip(self.offset, self.size, shape, strict=True)
        )

    def meet(self, other: Box) -> Box | None:
        """The elements that both boxes hold; None where there are none."""
        offset, size = [], []
        for a, n, b, m in zip(self.offset, self.size, other.offset, other.size, strict=True):
            first = a if a > b else b
            length = min(a + n, b + m) - first
            if length <= 0:
                return None
            offset.append(first)
            size.append(length)
        return Box(tuple(offset), tuple(size))

    def seen_from(self, origin: Sequence[int]) -> Box:
        """The same box in coordinates that begin at `origin`."""
        return Box(tuple(o - b for o, b in zip(self.offset, origin, strict=True)), self.size)

    def moved(self, by: Sequence[int]) -> Box:
        """The same box in coordinates in which its tensor begins at `by`."""
        return Box(tuple(o + b for o, b in zip(self.offset, by, strict=True)), self.size)

    def flat_range(self, shape: Sequence[int]) -> tuple[int, int]:
        """Half-open range of elements that the box takes in the flat row-major `shape`.

        Raises:
            PlanError: the box lies outside, or its elements are not contiguous in flat order.
        """
        got = f"offset {self.offset}, size {self.size}"
        if not self.is_within(shape):
            raise PlanError("A box lies outside its tensor", got=got, expected=tuple(shape))
        found = list(combs(row_major(shape), self))
        if len(found) > 1 or any(comb.count > 1 for comb in found):
            raise PlanError("A box is not contiguous in its tensor", got=got, expected=tuple(shape))
        start = found[0].start if found else 0
        return start, start + self.numel


def whole(shape: Sequence[int]) -> Box:
    """The box that is all of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def row_major(shape: Sequence[int]) -> Ints:
    """Strides, in elements, of a contiguous tensor, as torch gives them."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


def extent(size: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last one of a strided tensor, gaps included."""
    if 0 in size:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(size, strides, strict=True))


def round_up(value: int, multiple: int) -> int:
    """The next multiple of a number, or `value` itself where it is one."""
    return -(-value // multiple) * multiple


def boxes_of_range(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """Cuts the flat half-open range [start, end) of a row-major tensor into the fewest boxes.

    Args:
        shape: the tensor's shape; () is a scalar with one element, and an axis may be empty.
        start: first element of the range.
        end: one past the last element of the range.

    Returns:
        Disjoint boxes in flat order that together hold the range, each contiguous in flat order, so
        that a view of the flat shard takes a box's shape without a copy: none for an empty range,
        at most 2 * n - 1 otherwise, where n counts the axes longer than one.

    Raises:
        PlanError: the range does not lie within the shape.
    """
    shape = tuple(shape)
    if not 0 <= start <= end <= prod(shape) or min(shape, default=0) < 0:
        raise PlanError(
            "A flat range does not lie within its tensor",
            got=f"elements [{start}, {end})",
            expected=f"within [0, {prod(shape)}) of shape {shape}",
            next_step="The optimizer's buffer does not match the model's shapes; report the layout",
        )
    strides = row_major(shape)
    # Axes of length one never bound a box; looking at them would only cut boxes needlessly.
    axes = [axis for axis, length in enumerate(shape) if length > 1]
    boxes = []
    while start < end:
        offset = tuple(start // step % n for step, n in zip(strides, shape, strict=True))
        size = [1] * len(shape)
        for axis in axes:  # outermost first: the first axis along which a whole step fits wins
            steps = min((end - start) // strides[axis], shape[axis] - offset[axis])
            if start % strides[axis] == 0 and steps > 0:
                size[axis:] = steps, *shape[axis + 1 :]
                break
        boxes.append(Box(offset, tuple(size)))
        start += prod(size)
    return boxes


def tiles(shape: Sequence[int], limit_numel: int) -> Iterator[Box]:
    """Cuts a tensor into boxes of at most `limit_numel` elements (at least 1), in flat order.

    Each is contiguous in flat order.
    """
    shape = tuple(shape)
    if 0 in shape:
        return
    axis, inner = len(shape), 1
    while axis and inner * shape[axis - 1] <= limit_numel:
        axis -= 1
        inner *= shape[axis]
    if axis == 0:
        yield whole(shape)
        return
    axis -= 1
    step = max(1, limit_numel // inner)
    ones, zeros, tail = (1,) * axis, (0,) * (len(shape) - axis - 1), shape[axis + 1 :]
    for lead in product(*map(range, shape[:axis])):
        for start in range(0, shape[axis], step):
            size = (*ones, min(step, shape[axis] - start), *tail)
            yield Box((*lead, start, *zeros), size)


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


def combs(strides: Sequence[int], box: Box) -> Iterator[Comb]:
    """Where the elements of a box lie in a chunk, in the box's own row-major order.

    Args:
        strides: those of the chunk, in elements.
        box: a box of the chunk, in the chunk's coordinates.
    """
    size = box.size
    if 0 in size:
        return
    start = sum(o * stride for o, stride in zip(box.offset, strides, strict=True))
    axis, run = len(size), 1
    while axis and (size[axis - 1] == 1 or strides[axis - 1] == run):
        axis -= 1
        run *= size[axis]
    # Axes of length one need no loop; the innermost other one is the comb's.
    outer = [a for a in range(axis) if size[a] > 1]
    if not outer:
        yield Comb(start, run, 1, run)
        return
    teeth = outer.pop()
    for index in product(*(range(size[a]) for a in outer)):
        at = start + sum(i * strides[a] for i, a in zip(index, outer, strict=True))
        yield Comb(at, run, size[teeth], strides[teeth])

"""Flat ranges of row-major tensors as boxes: pure integers, no torch.

Megatron's distributed optimizer cuts its buffers by element count, so a rank owns a flat half-open
range of a parameter that need not end at a row. A checkpoint addresses hyper-rectangles. This
module cuts the one into the other. Every box is contiguous in the flat range too, so a view of the
flat shard takes the box's shape without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from vime_optim.errors import PlanError


@dataclass(frozen=True, slots=True)
class Box:
    """A hyper-rectangle of a row-major tensor that is contiguous in the tensor's flat order.

    Attributes:
        offset: index of the first element along each axis.
        size: number of elements along each axis; the box is half-open.
        flat_start: flat position of the first element within the tensor, in elements.
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]
    flat_start: int

    @property
    def numel(self) -> int:
        """Number of elements in the box."""
        return prod(self.size)

    @property
    def flat_end(self) -> int:
        """Flat position one past the last element, in elements."""
        return self.flat_start + self.numel


def boxes_of_range(shape: Sequence[int], start: int, end: int) -> tuple[Box, ...]:
    """Cuts the flat half-open range [start, end) of a row-major tensor into the fewest boxes.

    Args:
        shape: the tensor's shape; () is a scalar with one element, and an axis may be empty.
        start: first element of the range.
        end: one past the last element of the range.

    Returns:
        Disjoint boxes in flat order that together hold the range: none for an empty range, at most
        2 * n - 1 otherwise, where n counts the axes longer than one (one box where there are none).

    Raises:
        PlanError: the range does not lie within the shape.
    """
    shape = tuple(shape)
    check_range(shape, start, end)
    strides = _strides(shape)
    # Axes of length one never bound a box; looking at them would only cut boxes needlessly.
    axes = [axis for axis, length in enumerate(shape) if length > 1]
    boxes = []
    position = start
    while position < end:
        box = _largest_box(shape, strides, axes, position, end)
        boxes.append(box)
        position = box.flat_end
    return tuple(boxes)


def box_flat_range(
    shape: Sequence[int], offset: Sequence[int], size: Sequence[int]
) -> tuple[int, int]:
    """Flat half-open range [start, end), in elements, that a contiguous box takes in `shape`.

    Raises:
        PlanError: the box lies outside the shape, or its elements are not contiguous in flat order.
    """
    shape, offset, size = tuple(shape), tuple(offset), tuple(size)
    got = f"offset {offset}, size {size}"
    if not len(shape) == len(offset) == len(size):
        raise PlanError("A box and its tensor differ in axes", got=got, expected=shape)
    if any(o < 0 or s < 0 or o + s > n for n, o, s in zip(shape, offset, size, strict=True)):
        raise PlanError("A box lies outside its tensor", got=got, expected=shape)
    start = sum(o * stride for o, stride in zip(offset, _strides(shape), strict=True))
    # Contiguous: after the first axis that is longer than one, every axis must be taken whole.
    first_long = next((axis for axis, length in enumerate(size) if length > 1), len(shape))
    if prod(size) and size[first_long + 1 :] != shape[first_long + 1 :]:
        raise PlanError("A box is not contiguous in its tensor", got=got, expected=shape)
    return start, start + prod(size)


def intersect(a_start: int, a_end: int, b_start: int, b_end: int) -> tuple[int, int]:
    """Common part of two half-open ranges; an empty result has start == end.

    A reversed or empty input gives an empty result.
    """
    start = max(a_start, b_start)
    return start, max(start, min(a_end, b_end))


def check_range(shape: Sequence[int], start: int, end: int) -> None:
    """Raises PlanError unless [start, end) is a half-open range within the flat `shape`."""
    if any(length < 0 for length in shape):
        raise PlanError("A shape has a negative length", got=tuple(shape))
    numel = prod(shape)
    if not 0 <= start <= end <= numel:
        raise PlanError(
            "A flat range does not lie within its tensor",
            got=f"elements [{start}, {end})",
            expected=f"within [0, {numel}) of shape {tuple(shape)}",
            next_step="The optimizer's buffer does not match the model's shapes; report the layout",
        )


def _strides(shape: tuple[int, ...]) -> list[int]:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return strides


def _largest_box(
    shape: tuple[int, ...], strides: list[int], axes: list[int], position: int, end: int
) -> Box:
    """The longest contiguous box that starts at `position` and ends by `end`."""
    offset = tuple(
        position // stride % length for stride, length in zip(strides, shape, strict=True)
    )
    size = [1] * len(shape)
    for axis in axes:  # outermost first: the first axis along which a whole step fits wins
        stride = strides[axis]
        steps = min((end - position) // stride, shape[axis] - offset[axis])
        if position % stride == 0 and steps > 0:
            size[axis] = steps
            size[axis + 1 :] = shape[axis + 1 :]
            break
    return Box(offset, tuple(size), position)

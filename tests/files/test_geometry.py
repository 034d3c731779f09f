"""Boxes: flat ranges cut into them, their own arithmetic, and where their elements lie in a chunk.

Against brute force over numpy index arrays.
"""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime_optim.errors import PlanError
from vime_optim.files.geometry import Box, boxes_of_range, combs, round_up, row_major, tiles, whole

shapes = st.lists(st.integers(0, 4), max_size=5).map(tuple)
full_shapes = st.lists(st.integers(1, 4), max_size=5).map(tuple)


@st.composite
def shape_and_range(draw, shape_strategy=shapes):
    shape = draw(shape_strategy)
    numel = int(np.prod(shape, dtype=int))
    edge = st.one_of(st.integers(0, numel), st.sampled_from([0, numel]))
    start, end = sorted((draw(edge), draw(edge)))
    return shape, start, end


@st.composite
def boxes_in(draw: Any, shape: tuple[int, ...]) -> Box:
    offset = tuple(draw(st.integers(0, length - 1)) for length in shape)
    return Box(
        offset, tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True))
    )


@st.composite
def shapes_and_boxes(draw: Any) -> tuple[tuple[int, ...], Box]:
    shape = draw(st.lists(st.integers(1, 5), max_size=4).map(tuple))
    return shape, draw(boxes_in(shape))


def elements(shape: tuple[int, ...], box: Box) -> list[int]:
    numbers: list[int] = box.part_of(np.arange(prod(shape)).reshape(shape)).reshape(-1).tolist()
    return numbers


def is_contiguous_box(shape, start, end):
    """Brute force: do the flat elements [start, end) fill exactly one hyper-rectangle?"""
    coordinates = np.array(np.unravel_index(np.arange(start, end), shape)) if shape else None
    if coordinates is None:
        return end - start == 1
    spans = coordinates.max(axis=1) - coordinates.min(axis=1) + 1
    return int(np.prod(spans)) == end - start


def fewest_boxes(shape, start, end):
    """Fewest contiguous boxes that partition [start, end), by dynamic programming over all cuts."""
    best = {start: 0}
    for stop in range(start + 1, end + 1):
        best[stop] = 1 + min(
            best[cut] for cut in range(start, stop) if is_contiguous_box(shape, cut, stop)
        )
    return best[end]


@settings(max_examples=400, deadline=None)
@given(shape_and_range())
def test_boxes_hold_exactly_the_range_in_order(case):
    shape, start, end = case
    flat = np.arange(int(np.prod(shape, dtype=int)))
    found = []
    for box in boxes_of_range(shape, start, end):
        elements = box.part_of(flat.reshape(shape))
        assert elements.shape == box.size
        elements = elements.reshape(-1)
        assert box.numel == elements.size > 0
        flat_start, flat_end = box.flat_range(shape)
        assert elements[0] == flat_start
        # A view of the flat shard can be shaped as the box.
        assert np.array_equal(elements, np.arange(flat_start, flat_end))
        found.extend(elements.tolist())
    assert found == list(range(start, end))


@settings(max_examples=300, deadline=None)
@given(shape_and_range())
def test_count_is_at_most_two_per_axis_less_one(case):
    shape, start, end = case
    boxes = boxes_of_range(shape, start, end)
    long_axes = sum(length > 1 for length in shape)
    assert len(boxes) <= max(1, 2 * long_axes - 1)
    assert (len(boxes) == 0) == (start == end)


@settings(max_examples=60, deadline=None)
@given(shape_and_range(st.lists(st.integers(1, 3), max_size=4).map(tuple)))
def test_count_is_the_fewest_possible(case):
    shape, start, end = case
    assert len(boxes_of_range(shape, start, end)) == fewest_boxes(shape, start, end)


def test_bound_is_reached_in_five_dimensions():
    shape = (4, 4, 4, 4, 4)
    assert len(boxes_of_range(shape, 1, 4**5 - 1)) == 9


@pytest.mark.parametrize("shape", [(6, 4), (1, 6, 4), (6, 1, 4), (6, 4, 1), (1, 6, 1, 4, 1)])
def test_axes_of_one_add_no_boxes(shape):
    boxes = boxes_of_range(shape, 2, 21)
    assert [(b.flat_range(shape)[0], b.numel) for b in boxes] == [(2, 2), (4, 16), (20, 1)]


def test_known_cases():
    assert boxes_of_range((), 0, 1) == [Box((), ())]
    assert boxes_of_range((), 0, 0) == []
    assert boxes_of_range((1, 1), 0, 1) == [Box((0, 0), (1, 1))]
    assert boxes_of_range((3, 0, 2), 0, 0) == []
    assert boxes_of_range((7,), 2, 5) == [Box((2,), (3,))]
    assert boxes_of_range((2, 3), 0, 6) == [whole((2, 3))]
    assert boxes_of_range((2, 3), 1, 5) == [Box((0, 1), (1, 2)), Box((1, 0), (1, 2))]
    assert Box((0, 1), (1, 2)).flat_range((2, 3)) == (1, 3)
    assert str(Box((0, 1), (1, 2))) == "[0:1, 1:3]"


@settings(max_examples=200, deadline=None)
@given(shape_and_range(full_shapes))
def test_flat_range_of_a_box_is_where_it_was_cut(case):
    shape, start, end = case
    for box in boxes_of_range(shape, start, end):
        assert box.flat_range(shape) == (start, start + box.numel)
        start += box.numel
    assert start == end


@settings(max_examples=300, deadline=None)
@given(full_shapes, st.data())
def test_flat_range_of_any_box_against_brute_force(shape, data):
    box = data.draw(boxes_in(shape))
    numbers = elements(shape, box)
    first, last = numbers[0], numbers[-1]
    if last - first + 1 == len(numbers):
        assert box.flat_range(shape) == (first, last + 1)
    else:
        with pytest.raises(PlanError, match="not contiguous"):
            box.flat_range(shape)


@pytest.mark.parametrize(
    ("shape", "offset", "size"),
    [((4,), (3,), (2,)), ((4,), (-1,), (2,)), ((4,), (0,), (-1,)), ((4, 2), (0,), (1,))],
)
def test_flat_range_refuses_boxes_outside(shape, offset, size):
    assert not Box(offset, size).is_within(shape)
    with pytest.raises(PlanError):
        Box(offset, size).flat_range(shape)


@pytest.mark.parametrize(
    ("shape", "start", "end"),
    [((3, 2), -1, 2), ((3, 2), 4, 3), ((3, 2), 0, 7), ((), 0, 2), ((0, 4), 0, 1), ((-2, -3), 0, 6)],
)
def test_ranges_outside_the_shape_are_refused(shape, start, end):
    with pytest.raises(PlanError) as caught:
        boxes_of_range(shape, start, end)
    assert str(shape) in str(caught.value)


# --- boxes among each other


@given(st.data())
def test_what_two_boxes_share_against_sets(data):
    shape = data.draw(full_shapes)
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    met = a.meet(b)
    common = set(elements(shape, a)) & set(elements(shape, b))
    assert (set() if met is None else set(elements(shape, met))) == common
    assert met == b.meet(a)
    if met is not None:
        numbers = np.arange(prod(shape)).reshape(shape)
        inside = met.seen_from(a.offset)
        assert inside.is_within(a.size)
        assert np.array_equal(inside.part_of(a.part_of(numbers)), met.part_of(numbers))
        assert inside.moved(a.offset) == met


@given(*[st.integers(0, 12)] * 4)
def test_ranges_share_what_their_sets_do(a_start, a_end, b_start, b_end):
    one, other = (
        Box((start,), (max(0, end - start),)) for start, end in ((a_start, a_end), (b_start, b_end))
    )
    met = one.meet(other)
    common = set(range(a_start, a_end)) & set(range(b_start, b_end))
    assert (set() if met is None else set(range(*met.flat_range((13,))))) == common


@given(full_shapes)
def test_strides_are_those_of_a_contiguous_array(shape):
    strides = np.zeros(shape, dtype=np.int8).strides
    assert all(a == b for a, b, n in zip(row_major(shape), strides, shape, strict=True) if n > 1)


@given(st.integers(0, 1000), st.integers(1, 70))
def test_round_up_is_the_first_multiple_that_is_not_less(value, multiple):
    found = round_up(value, multiple)
    assert found % multiple == 0
    assert value <= found < value + multiple


# --- where the elements of a box lie in a chunk


@given(shapes_and_boxes(), st.data())
def test_combs_hold_the_box_in_its_own_order(case: Any, data: Any) -> None:
    shape, box = case
    # Rows stored with gaps behind them, or the axes in another order, as of a transposed tensor.
    axes = data.draw(st.permutations(range(len(shape))))
    room = tuple(shape[axis] + data.draw(st.integers(0, 1)) for axis in axes)
    strides = [row_major(room)[axes.index(axis)] for axis in range(len(shape))]
    found = [
        comb.start + tooth * comb.step + element
        for comb in combs(strides, box)
        for tooth in range(comb.count)
        for element in range(comb.run)
    ]
    numbers = (
        np.arange(prod(room)).reshape(room).transpose([axes.index(a) for a in range(len(axes))])
    )
    assert found == box.part_of(numbers).reshape(-1).tolist()


@given(shapes_and_boxes())
def test_rows_that_are_taken_whole_are_one_run(case: Any) -> None:
    shape, box = case
    lead = next((axis for axis, length in enumerate(box.size) if length > 1), len(box.size))
    if box.size[lead + 1 :] == shape[lead + 1 :]:
        (comb,) = combs(row_major(shape), box)
        assert (comb.run, comb.count) == (box.numel, 1)


@given(shapes_and_boxes(), st.integers(1, 30))
def test_cut_boxes_are_small_and_keep_every_element_in_order(case: Any, limit: int) -> None:
    size = case[1].size
    found: list[int] = []
    for part in tiles(size, limit):
        assert 0 < part.numel <= limit
        numbers = elements(size, part)
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        found += numbers
    assert found == list(range(prod(size)))


def test_every_cut_of_every_small_box() -> None:
    """Each part lies within the box and within the limit, and none is missing: all of 0..3 axes."""
    for size in (size for axes in range(4) for size in product(range(1, 6), repeat=axes)):
        for limit in range(1, prod(size) + 2):
            parts = list(tiles(size, limit))
            found: list[int] = []
            for part in parts:
                assert part.is_within(size), (size, limit, part)
                assert 0 < part.numel <= limit
                found += elements(size, part)
            assert found == list(range(prod(size))), (size, limit, parts)


def test_an_empty_box_has_no_elements() -> None:
    assert list(combs(row_major((3, 0)), whole((3, 0)))) == []
    assert list(tiles((3, 0), 4)) == []


def test_a_scalar_is_one_run() -> None:
    (comb,) = combs((), whole(()))
    assert (comb.start, comb.numel) == (0, 1)
    assert list(tiles((), 4)) == [whole(())]

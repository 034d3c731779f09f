"""Flat ranges to boxes, against brute force over numpy index arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime_optim.errors import PlanError
from vime_optim.files.region import Box, box_flat_range, boxes_of_range, intersect

shapes = st.lists(st.integers(0, 4), max_size=5).map(tuple)
full_shapes = st.lists(st.integers(1, 4), max_size=5).map(tuple)


@st.composite
def shape_and_range(draw, shape_strategy=shapes):
    shape = draw(shape_strategy)
    numel = int(np.prod(shape, dtype=int))
    edge = st.one_of(st.integers(0, numel), st.sampled_from([0, numel]))
    start, end = sorted((draw(edge), draw(edge)))
    return shape, start, end


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
        slices = tuple(slice(o, o + s) for o, s in zip(box.offset, box.size, strict=True))
        elements = flat.reshape(shape)[slices]
        assert elements.shape == box.size
        elements = elements.reshape(-1)
        assert box.numel == elements.size > 0
        assert elements[0] == box.flat_start
        # A view of the flat shard can be shaped as the box.
        assert np.array_equal(elements, np.arange(box.flat_start, box.flat_end))
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
    assert [(b.flat_start, b.numel) for b in boxes] == [(2, 2), (4, 16), (20, 1)]


def test_known_cases():
    assert boxes_of_range((), 0, 1) == (Box((), (), 0),)
    assert boxes_of_range((), 0, 0) == ()
    assert boxes_of_range((1, 1), 0, 1) == (Box((0, 0), (1, 1), 0),)
    assert boxes_of_range((3, 0, 2), 0, 0) == ()
    assert boxes_of_range((7,), 2, 5) == (Box((2,), (3,), 2),)
    assert boxes_of_range((2, 3), 0, 6) == (Box((0, 0), (2, 3), 0),)
    assert boxes_of_range((2, 3), 1, 5) == (Box((0, 1), (1, 2), 1), Box((1, 0), (1, 2), 3))
    assert Box((0, 1), (1, 2), 1).flat_end == 3


@settings(max_examples=200, deadline=None)
@given(shape_and_range(full_shapes))
def test_flat_range_of_a_box_is_where_it_was_cut(case):
    shape, start, end = case
    for box in boxes_of_range(shape, start, end):
        assert box_flat_range(shape, box.offset, box.size) == (box.flat_start, box.flat_end)


@settings(max_examples=300, deadline=None)
@given(full_shapes, st.data())
def test_flat_range_of_any_box_against_brute_force(shape, data):
    offset = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    size = tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True))
    slices = tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))
    elements = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)[slices].reshape(-1)
    first, last = int(elements[0]), int(elements[-1])
    if last - first + 1 == elements.size:
        assert box_flat_range(shape, offset, size) == (first, last + 1)
    else:
        with pytest.raises(PlanError, match="not contiguous"):
            box_flat_range(shape, offset, size)


@pytest.mark.parametrize(
    ("shape", "offset", "size"),
    [((4,), (3,), (2,)), ((4,), (-1,), (2,)), ((4,), (0,), (-1,)), ((4, 2), (0,), (1,))],
)
def test_flat_range_refuses_boxes_outside(shape, offset, size):
    with pytest.raises(PlanError):
        box_flat_range(shape, offset, size)


@pytest.mark.parametrize(
    ("shape", "start", "end"),
    [((3, 2), -1, 2), ((3, 2), 4, 3), ((3, 2), 0, 7), ((), 0, 2), ((0, 4), 0, 1), ((-2, -3), 0, 6)],
)
def test_ranges_outside_the_shape_are_refused(shape, start, end):
    with pytest.raises(PlanError) as caught:
        boxes_of_range(shape, start, end)
    assert str(shape) in str(caught.value)


@given(*[st.integers(0, 12)] * 4)
def test_intersect_against_sets(a_start, a_end, b_start, b_end):
    start, end = intersect(a_start, a_end, b_start, b_end)
    common = set(range(a_start, a_end)) & set(range(b_start, b_end))
    assert set(range(start, end)) == common
    assert start <= end

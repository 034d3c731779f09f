"""Overlaps and gaps of boxes, against brute force over counted elements."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime_optim.files import cover
from vime_optim.files.cover import find_fault


def brute_force(lo, hi, shape):
    count = np.zeros(shape, dtype=int)
    for a, b in zip(lo, hi, strict=True):
        count[tuple(slice(x, y) for x, y in zip(a, b, strict=True))] += 1
    return count


@st.composite
def random_boxes(draw):
    """Guillotine cuts of a tensor, perhaps with a box changed, dropped or doubled."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    boxes = [(tuple(0 for _ in shape), shape)]
    for _ in range(draw(st.integers(0, 12)) if shape else 0):
        index = draw(st.integers(0, len(boxes) - 1))
        axis = draw(st.integers(0, len(shape) - 1))
        lo, hi = boxes[index]
        if hi[axis] - lo[axis] > 1:
            at = draw(st.integers(lo[axis] + 1, hi[axis] - 1))
            boxes[index] = (lo, hi[:axis] + (at,) + hi[axis + 1 :])
            boxes.append((lo[:axis] + (at,) + lo[axis + 1 :], hi))
    action = draw(st.sampled_from(["none", "drop", "double", "random", "shrink"]))
    index = draw(st.integers(0, len(boxes) - 1))
    if action == "drop":
        boxes.pop(index)
    elif action == "double":
        boxes.append(boxes[index])
    elif action == "random":
        lo = tuple(draw(st.integers(0, n - 1)) for n in shape)
        boxes.append((lo, tuple(draw(st.integers(a, n)) for a, n in zip(lo, shape, strict=True))))
    elif action == "shrink" and shape:
        lo, hi = boxes[index]
        boxes[index] = (lo, (hi[0] - 1, *hi[1:]))
    return shape, draw(st.permutations(boxes))


def as_arrays(boxes, axes):
    lo = np.array([b[0] for b in boxes], dtype=np.int64).reshape(len(boxes), axes)
    hi = np.array([b[1] for b in boxes], dtype=np.int64).reshape(len(boxes), axes)
    return lo, hi


def assert_fault_is_real(fault, count, boxes, full):
    assert all(s > 0 for s in fault.size)
    region = tuple(slice(o, o + s) for o, s in zip(fault.offset, fault.size, strict=True))
    if not fault.boxes:
        assert full
        assert (count[region] == 0).all()
        return
    first, second = fault.boxes
    assert first != second
    for index in fault.boxes:
        lo, hi = boxes[index]
        assert all(a <= o for a, o in zip(lo, fault.offset, strict=True))
        ends = [o + s for o, s in zip(fault.offset, fault.size, strict=True)]
        assert all(b >= e for b, e in zip(hi, ends, strict=True))


@pytest.mark.parametrize("few", [0, cover._FEW])
@pytest.mark.parametrize("full", [True, False])
@settings(max_examples=120, deadline=None)
@given(random_boxes())
def test_faults_against_brute_force(full, few, case):
    shape, boxes = case
    lo, hi = as_arrays(boxes, len(shape))
    count = brute_force(lo, hi, shape)
    with mock.patch.object(cover, "_FEW", few):  # 0: without the shortcut for a few boxes
        fault = find_fault(lo, hi, shape, full=full)
    sound = (count == 1).all() if full else (count <= 1).all()
    assert (fault is None) == bool(sound)
    if fault is not None:
        assert_fault_is_real(fault, count, boxes, full)


@pytest.mark.parametrize("few", [0, cover._FEW])
@pytest.mark.parametrize("full", [True, False])
@settings(max_examples=120, deadline=None)
@given(st.data())
def test_faults_of_arbitrary_boxes_against_brute_force(full, few, data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    boxes = []
    for _ in range(data.draw(st.integers(0, 6))):
        lo = tuple(data.draw(st.integers(0, n)) for n in shape)
        hi = tuple(data.draw(st.integers(a, n)) for a, n in zip(lo, shape, strict=True))
        boxes.append((lo, hi))
    lo, hi = as_arrays(boxes, len(shape))
    count = brute_force(lo, hi, shape)
    with mock.patch.object(cover, "_FEW", few):  # 0: without the shortcut for a few boxes
        fault = find_fault(lo, hi, shape, full=full)
    sound = (count == 1).all() if full else (count <= 1).all()
    assert (fault is None) == bool(sound)
    if fault is not None:
        assert_fault_is_real(fault, count, boxes, full)


@pytest.mark.parametrize("few", [0, cover._FEW])
def test_a_pinwheel_has_no_plane_and_is_still_sound(few, monkeypatch):
    monkeypatch.setattr(cover, "_FEW", few)
    boxes = [
        ((0, 0), (1, 2)),
        ((0, 2), (2, 3)),
        ((2, 1), (3, 3)),
        ((1, 0), (3, 1)),
        ((1, 1), (2, 2)),
    ]
    lo, hi = as_arrays(boxes, 2)
    assert find_fault(lo, hi, (3, 3), full=True) is None
    fault = find_fault(lo[:4], hi[:4], (3, 3), full=True)
    assert (fault.offset, fault.size, fault.boxes) == ((1, 1), (1, 1), ())


def test_many_boxes_take_no_quadratic_time():
    """200,000 sound boxes, and 200,000 nested ones whose pairs all overlap."""
    n = 200_000
    edges = np.arange(n, dtype=np.int64)[:, None]
    rng = np.random.default_rng(0)
    order = rng.permutation(n)
    compared = 0
    candidates = cover._candidates

    def counting(*arguments):
        nonlocal compared
        for pairs in candidates(*arguments):
            compared += len(pairs[0])
            assert compared <= 10 * n  # each box a few times over; all pairs would be 4e10
            yield pairs

    with mock.patch.object(cover, "_candidates", counting):
        assert find_fault(edges[order], edges[order] + 1, (n,), full=True) is None
        gap = find_fault(edges[order[1:]], edges[order[1:]] + 1, (n,), full=True)
        fault = find_fault(np.zeros_like(edges), edges + 1, (n,), full=True)
    assert (gap.offset, gap.size, gap.boxes) == ((order[0],), (1,), ())
    assert len(fault.boxes) == 2
    assert compared >= n


def test_a_tensor_of_more_elements_than_64_bits_count():
    """As a hostile file may claim: found without an overflow."""
    shape = (1 << 61, 1 << 61, 1 << 61)
    lo = np.zeros((10, 3), dtype=np.int64)
    hi = np.full((10, 3), 1 << 61, dtype=np.int64)
    lo[:, 0] = np.arange(10)
    hi[:9, 0] = np.arange(1, 10)
    assert find_fault(lo, hi, shape, full=True) is None
    lo[9, 1] = 7
    fault = find_fault(lo, hi, shape, full=True)
    assert (fault.offset[1], fault.size[1], fault.boxes) == (0, 7, ())

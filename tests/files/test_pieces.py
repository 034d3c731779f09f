"""Boxes of chunks as combs of elements, against numpy."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vime_optim.files.pieces import combs, cut


@st.composite
def boxes(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    offset, size = [], []
    for length in shape:
        first = draw(st.integers(0, length - 1))
        offset.append(first)
        size.append(draw(st.integers(1, length - first)))
    return shape, tuple(offset), tuple(size)


def elements(shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...]) -> list[int]:
    index = tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))
    numbers: list[int] = np.arange(prod(shape)).reshape(shape)[index].reshape(-1).tolist()
    return numbers


@given(boxes())
def test_combs_hold_the_box_in_its_own_order(box: Any) -> None:
    shape, offset, size = box
    found = [
        comb.start + tooth * comb.step + element
        for comb in combs(shape, offset, size)
        for tooth in range(comb.count)
        for element in range(comb.run)
    ]
    assert found == elements(shape, offset, size)


@given(boxes())
def test_rows_that_are_taken_whole_are_one_run(box: Any) -> None:
    shape, offset, size = box
    lead = next((axis for axis, length in enumerate(size) if length > 1), len(size))
    if size[lead + 1 :] == shape[lead + 1 :]:
        (comb,) = combs(shape, offset, size)
        assert (comb.run, comb.count) == (prod(size), 1)


@given(boxes(), st.integers(1, 30))
def test_cut_boxes_are_small_and_keep_every_element_in_order(box: Any, limit: int) -> None:
    size = box[2]
    found: list[int] = []
    for offset, part in cut(size, limit):
        assert 0 < prod(part) <= limit
        numbers = elements(size, offset, part)
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        found += numbers
    assert found == list(range(prod(size)))


def test_every_cut_of_every_small_box() -> None:
    """Each part lies within the box and within the limit, and none is missing: all of 0..3 axes."""
    for size in (size for axes in range(4) for size in product(range(1, 6), repeat=axes)):
        for limit in range(1, prod(size) + 2):
            parts = list(cut(size, limit))
            found: list[int] = []
            for offset, part in parts:
                assert len(offset) == len(part) == len(size)
                for first, length, whole in zip(offset, part, size, strict=True):
                    assert 0 <= first < first + length <= whole, (size, limit, offset, part)
                assert 0 < prod(part) <= limit
                found += elements(size, offset, part)
            assert found == list(range(prod(size))), (size, limit, parts)


def test_an_empty_box_has_no_elements() -> None:
    assert list(combs((3, 0), (0, 0), (3, 0))) == []
    assert list(cut((3, 0), 4)) == []


def test_a_scalar_is_one_run() -> None:
    (comb,) = combs((), (), ())
    assert (comb.start, comb.numel) == (0, 1)
    assert list(cut((), 4)) == [((), ())]

"""Do boxes overlap, and do they fill a tensor? Close to linear in the boxes, as arrays; no torch.

A box is half-open: [lo, hi) along each axis. Two boxes overlap when a.lo < b.hi and b.lo < a.hi
along every axis: torch's rule, by which an empty box within another one overlaps it.

Two boxes of one checkpoint key may come from any two ranks, and tensor parallelism makes them
interleave in flat order, so sorting flat intervals is not enough. Sets of boxes are taken apart
along planes that no box crosses, axis by axis, again and again, every group of boxes in the same
pass over the arrays. Layouts made of layers, experts, tensor-parallel blocks and cut flat ranges
come apart wholly in a few passes. What does not is compared pair by pair.

Disjoint boxes within a tensor fill it when their volumes add up to its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from math import prod
from operator import lt
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from vime_optim.files.geometry import Box

Ints: TypeAlias = NDArray[np.int64]

_FEW = 8
"""Up to so many boxes, comparing all pairs is faster than numpy's calls."""

_MOST_ROUNDS = 64
"""Rounds over all axes. Real layouts need two or three; a spiral of n boxes would need n."""

_FEW_SAVED = 16
"""Groups of saved boxes that are small enough to try each."""

_PAIRS_AT_ONCE = 1 << 20
_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class Fault(Box):
    """A region of a tensor that is held by no box, or by two.

    Attributes:
        boxes: indices of two boxes that overlap there; () where no box holds the region.
    """

    boxes: tuple[int, ...]


def fault_of(boxes: Sequence[Box], shape: Sequence[int], *, full: bool) -> Fault | None:
    """find_fault of boxes, as values, that lie within the shape."""
    lo = np.array([box.offset for box in boxes], dtype=np.int64).reshape(len(boxes), len(shape))
    size = np.array([box.size for box in boxes], dtype=np.int64).reshape(lo.shape)
    return find_fault(lo, lo + size, shape, full=full)


def find_fault(lo: Ints, hi: Ints, shape: Sequence[int], *, full: bool) -> Fault | None:
    """An overlap, or with `full` also a gap, of boxes in a tensor; None where there is none.

    Args:
        lo: first index of each box, int64 [boxes, axes].
        hi: one past the last index of each box, int64 [boxes, axes]; must lie within the shape.
        shape: the tensor's shape.
        full: whether the boxes must also leave no element out.
    """
    ids = np.flatnonzero((hi > lo).all(axis=1))  # empty boxes hold nothing
    lo, hi = lo[ids], hi[ids]
    pair = _pair_of_few(lo, hi) if len(ids) <= _FEW else _pair_of_many(lo, hi)
    if pair is not None:
        one, other = pair
        held_twice = np.maximum(lo[one], lo[other]), np.minimum(hi[one], hi[other])
        return _fault(*held_twice, int(ids[one]), int(ids[other]))
    return _gap(lo, hi, shape) if full else None


def _fault(lo: Ints, hi: Ints, *boxes: int) -> Fault:
    return Fault(tuple(lo.tolist()), tuple((hi - lo).tolist()), boxes)


def _pair_of_few(lo: Ints, hi: Ints) -> tuple[int, int] | None:
    boxes = enumerate(zip(lo.tolist(), hi.tolist(), strict=True))
    for (one, (a_lo, a_hi)), (other, (b_lo, b_hi)) in combinations(boxes, 2):
        if all(map(lt, a_lo, b_hi)) and all(map(lt, b_lo, a_hi)):
            return one, other
    return None


def _pair_of_many(lo: Ints, hi: Ints) -> tuple[int, int] | None:
    """Two boxes that overlap; None where none do."""
    ranks = np.empty((2, *lo.shape), dtype=np.int64)
    for axis in range(lo.shape[1]):  # ranks among the borders tell the same, and are small
        borders = np.unique(np.concatenate((lo[:, axis], hi[:, axis])))
        ranks[:, :, axis] = np.searchsorted(borders, (lo[:, axis], hi[:, axis]))
    ids, group = entangled(ranks[0], ranks[1], np.zeros(len(lo), dtype=np.int64))
    for a, b in _candidates(ids, group, ids, group):
        both = (a < b) & ((lo[a] < hi[b]) & (lo[b] < hi[a])).all(axis=1)
        for at in np.flatnonzero(both)[:1]:
            return int(a[at]), int(b[at])
    return None


def _gap(lo: Ints, hi: Ints, shape: Sequence[int]) -> Fault | None:
    """A region that no one of disjoint boxes holds; None where they fill the tensor.

    Of two halves of a region that is not filled one is not filled, and so on, down to one that no
    box reaches into.
    """
    first, end = np.zeros(len(shape), np.int64), np.array(shape, np.int64)
    numel: type[object] = np.int64 if prod(shape) < _LIMIT else object

    def is_filled() -> bool:
        held = np.multiply.reduce((hi - lo).astype(numel), axis=1).sum()
        return bool(held == np.multiply.reduce((end - first).astype(numel)))

    if is_filled():
        return None
    while len(lo):
        inner = [
            np.unique(borders[(borders > first[axis]) & (borders < end[axis])])
            for axis, borders in enumerate(np.concatenate((lo, hi)).T)
        ]
        axis = max(range(len(inner)), key=lambda axis: len(inner[axis]))
        plane = inner[axis][len(inner[axis]) // 2]
        before = lo, hi, first.copy(), end.copy()
        end[axis] = plane
        lo, hi = _clipped(lo, hi, first, end)
        if is_filled():
            lo, hi, first, end = before
            first[axis] = plane
            lo, hi = _clipped(lo, hi, first, end)
    return _fault(first, end)


def _clipped(lo: Ints, hi: Ints, first: Ints, end: Ints) -> tuple[Ints, Ints]:
    """What of the boxes lies in the region [first, end)."""
    lo, hi = np.maximum(lo, first), np.minimum(hi, end)
    keep = (hi > lo).all(axis=1)
    return lo[keep], hi[keep]


def as_array(tuples: Sequence[Sequence[int]], axes: int) -> Ints:
    """Equally long tuples of integers as int64 [tuples, axes].

    Raises:
        ValueError: they are not all of `axes` integers.
    """
    if not set(map(len, tuples)) <= {axes}:
        raise ValueError(f"tuples of another length than {axes}")
    flat = np.fromiter(chain.from_iterable(tuples), dtype=np.int64, count=len(tuples) * axes)
    return flat.reshape(len(tuples), axes)


def volumes(sizes: Ints) -> Ints:
    """Elements of each box.

    Raises:
        ValueError: a volume would not fit 63 bits.
    """
    if len(sizes) and np.multiply.reduce(sizes.astype(np.float64), axis=1).max() >= _LIMIT:
        raise ValueError("a box of 2**62 elements and more")
    product: Ints = np.multiply.reduce(sizes, axis=1, dtype=np.int64)
    return product


def entangled(lo: Ints, hi: Ints, group: Ints) -> tuple[Ints, Ints]:
    """The boxes that planes alone cannot tell apart from all others of their group.

    Args:
        lo, hi: int64 [boxes, axes], none negative, lo <= hi.
        group: int64 [boxes]; boxes of different groups are never compared.

    Returns:
        Their indices and, for each, the number of the finer group that it was left in. A box that
        is not among them overlaps no other of its group.
    """
    ids = np.arange(len(lo))
    for _ in range(_MOST_ROUNDS):
        before = len(ids), _number(group)
        for axis in range(lo.shape[1]):
            ids, group = _without_singles(ids, group)
            if len(ids) == 0:
                return ids, group
            order, group, _ = _split(lo[ids, axis], hi[ids, axis], group)
            ids = ids[order]
        ids, group = _without_singles(ids, group)
        if len(ids) == 0 or (len(ids), _number(group)) == before:
            break
    return ids, group


def _number(group: Ints) -> int:
    return int(group.max()) + 1 if len(group) else 0


def _without_singles(ids: Ints, group: Ints) -> tuple[Ints, Ints]:
    """Groups of two boxes and more, numbered anew without gaps."""
    _, group, counts = np.unique(group, return_inverse=True, return_counts=True)
    keep = counts[group] > 1
    _, group = np.unique(group[keep], return_inverse=True)
    return ids[keep], group.astype(np.int64)


def _split(lo: Ints, hi: Ints, group: Ints) -> tuple[Ints, Ints, Ints]:
    """Splits groups along one axis at planes that no box of the group crosses.

    Returns the boxes' order, the new group of each in that order, and the position in it of the
    first box of each group. Boxes are ordered by group and then by lo.
    """
    order = np.lexsort((hi, lo, group))
    span = int(hi.max()) + 1
    if span * (_number(group) + 1) >= _LIMIT:
        raise ValueError("coordinates of 2**62 and more")
    base = group[order] * span
    starts = base + lo[order]
    ends = np.maximum.accumulate(base + hi[order])
    is_first = np.ones(len(order), dtype=bool)
    # Where boxes of two groups meet, the next group's base is greater than every end before it.
    is_first[1:] = starts[1:] >= ends[:-1]
    return order, np.cumsum(is_first) - 1, np.flatnonzero(is_first)


def are_disjoint(offsets: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]) -> bool:
    """Whether planes alone show that no two boxes overlap. False where that is not known."""
    try:
        lo = as_array(offsets, len(offsets[0]))
        size = as_array(sizes, len(offsets[0]))
        if lo.shape[1] == 0 or int(lo.min()) < 0 or int(size.min()) < 1:
            return False
        left, _ = entangled(lo, lo + size, np.zeros(len(lo), dtype=np.int64))
    except (ValueError, OverflowError, TypeError):
        return False
    return len(left) == 0


def overlapping_pairs(a_lo: Ints, a_hi: Ints, b_lo: Ints, b_hi: Ints) -> tuple[Ints, Ints]:
    """Every pair (index into a, index into b) of boxes that overlap, ordered by a and then b.

    Args:
        a_lo, a_hi: int64 [m, axes]; m boxes to look for, as those that a rank wants.
        b_lo, b_hi: int64 [n, axes], not negative; n boxes to look among, as those of a file.

    The time is near (m + n) log n and the number of pairs where b comes apart along planes.
    """
    a_ids, b_ids = np.arange(len(a_lo)), np.arange(len(b_lo))
    a_group, b_group = np.zeros(len(a_lo), np.int64), np.zeros(len(b_lo), np.int64)
    for _ in range(_MOST_ROUNDS):
        before = _number(b_group)
        for axis in range(a_lo.shape[1]):
            if len(a_ids) == 0 or _largest(b_group) <= _FEW_SAVED:
                break
            order, split, first = _split(b_lo[b_ids, axis], b_hi[b_ids, axis], b_group)
            spans = (
                b_group[order][first],
                b_lo[b_ids[order[first]], axis],
                _ends(b_hi[b_ids[order], axis], first),
            )
            a_ids, a_group = _into(a_ids, a_group, a_lo[a_ids, axis], a_hi[a_ids, axis], *spans)
            b_ids, b_group = b_ids[order], split
            # Only groups that somebody looks into are taken further apart.
            wanted = np.zeros(_number(b_group), dtype=bool)
            wanted[a_group] = True
            number = np.cumsum(wanted) - 1
            b_ids, b_group = b_ids[wanted[b_group]], number[b_group[wanted[b_group]]]
            a_group = number[a_group]
        if len(a_ids) == 0 or _number(b_group) == before or _largest(b_group) <= _FEW_SAVED:
            break
    found = [np.zeros((2, 0), dtype=np.int64)]
    for a, b in _candidates(a_ids, a_group, b_ids, b_group):
        keep = ((a_lo[a] < b_hi[b]) & (b_lo[b] < a_hi[a])).all(axis=1)
        found.append(np.stack((a[keep], b[keep])))
    pairs = np.concatenate(found, axis=1)
    order = np.lexsort((pairs[1], pairs[0]))
    return pairs[0][order], pairs[1][order]


def _largest(group: Ints) -> int:
    return int(np.bincount(group).max()) if len(group) else 0


def _ends(hi: Ints, first: Ints) -> Ints:
    ends: Ints = np.maximum.reduceat(hi, first)
    return ends


def _into(
    ids: Ints, group: Ints, lo: Ints, hi: Ints, of_group: Ints, starts: Ints, ends: Ints
) -> tuple[Ints, Ints]:
    """Gives each box to every part of its group that it touches; parts are in order and disjoint.

    Args:
        ids, group, lo, hi: the boxes along one axis.
        of_group, starts, ends: of each part; ordered by group and then by start.
    """
    span = int(max(ends.max(), hi.max())) + 1
    if span * (_number(of_group) + 1) >= _LIMIT:
        raise ValueError("coordinates of 2**62 and more")
    base = of_group * span
    first = np.searchsorted(base + ends, group * span + np.maximum(lo, 0), side="right")
    last = np.searchsorted(base + starts, group * span + np.minimum(hi, span - 1), side="left")
    counts = np.maximum(last - first, 0)
    part = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
    return np.repeat(ids, counts), part


def _candidates(
    a_ids: Ints, a_group: Ints, b_ids: Ints, b_group: Ints
) -> Iterator[tuple[Ints, Ints]]:
    """All pairs of boxes of equal groups, about a million at a time."""
    counts = np.bincount(b_group, minlength=_number(a_group))
    order = np.argsort(b_group, kind="stable")
    start = np.cumsum(counts) - counts
    each = counts[a_group]
    done = np.cumsum(each)
    begin = 0
    while begin < len(a_ids):
        already = int(done[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(done, already + _PAIRS_AT_ONCE)))
        n = each[begin:end]
        at = np.repeat(start[a_group[begin:end]] - np.cumsum(n) + n, n) + np.arange(n.sum())
        yield np.repeat(a_ids[begin:end], n), b_ids[order[at]]
        begin = end

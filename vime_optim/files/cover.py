"""Do boxes overlap, and do they fill a tensor? Any number of axes, close to linear in the boxes.

Two boxes of one checkpoint key may come from any two ranks, and tensor parallelism makes them
interleave in flat order, so sorting flat intervals is not enough. Here a set of boxes is split
along whichever axis has a plane that no box crosses, again and again, until single boxes are left.
Layouts made of tensor, expert and pipeline splits and of cut flat ranges have such planes all the
way down. Sets without one (pinwheels, overlapping boxes) are sliced into slabs instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from operator import lt, sub
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vime_optim.files.geometry import Box

Ints: TypeAlias = NDArray[np.int64]

# Box-in-slab entries made at once; more slabs are made only as the earlier ones turn out sound.
_SLAB_CHUNK = 1 << 18
# Up to this many boxes, comparing all pairs is faster than numpy's calls.
_FEW = 8


@dataclass(frozen=True, slots=True)
class Fault(Box):
    """A region of a tensor that is held by no box, or by two.

    Attributes:
        boxes: indices of two boxes that overlap there; () where no box holds the region.
    """

    boxes: tuple[int, ...]


class HasBox(Protocol):
    """What has a place in a tensor, as a Box has."""

    @property
    def offset(self) -> tuple[int, ...]: ...

    @property
    def size(self) -> tuple[int, ...]: ...


@dataclass(slots=True)
class _Task:
    """Boxes `ids`, clipped to [lo, hi), to be examined within [region_lo, region_hi)."""

    ids: Ints
    lo: Ints
    hi: Ints
    region_lo: Ints
    region_hi: Ints


def fault_of(boxes: Sequence[HasBox], shape: Sequence[int], *, full: bool) -> Fault | None:
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
    keep = np.flatnonzero((hi > lo).all(axis=1))  # empty boxes hold nothing
    region_lo = np.zeros(len(shape), dtype=np.int64)
    region_hi = np.asarray(shape, dtype=np.int64)
    start = _Task(keep, lo[keep], hi[keep], region_lo, region_hi)
    stack: list[Iterator[_Task | Fault]] = [iter((start,))]
    while stack:
        item = next(stack[-1], None)
        if item is None:
            stack.pop()
        elif isinstance(item, Fault):
            return item
        else:
            stack.append(_examine(item, full))
    return None


def _examine(task: _Task, full: bool) -> Iterator[_Task | Fault]:
    """Settles a task, or yields the smaller tasks and the faults that it comes down to."""
    if len(task.ids) == 0:
        if full and prod((task.region_hi - task.region_lo).tolist()) > 0:
            yield _fault(task.region_lo, task.region_hi)
        return
    if len(task.ids) == 1:
        if full:
            yield from _gap_around(task.lo[0], task.hi[0], task.region_lo, task.region_hi)
        return
    if len(task.ids) <= _FEW and _few_are_sound(task, full):
        return
    for axis in range(task.lo.shape[1]):
        groups = _split(task, axis)
        if groups is not None:
            yield from _examine_groups(task, axis, *groups, full)
            return
    yield from _examine_slabs(task)


def _few_are_sound(task: _Task, full: bool) -> bool:
    """Whether a few boxes are disjoint, and with `full` fill their region: by comparing all pairs.

    A shortcut that only ever says yes; what is wrong, and where, is found the long way.
    """
    boxes = list(zip(task.lo.tolist(), task.hi.tolist(), strict=True))
    for (a_lo, a_hi), (b_lo, b_hi) in combinations(boxes, 2):
        if all(map(lt, a_lo, b_hi)) and all(map(lt, b_lo, a_hi)):
            return False
    if not full:
        return True
    # Disjoint boxes within a region fill it if their volumes add up to its own.
    held: int = sum(prod(map(sub, hi, lo)) for lo, hi in boxes)
    region: int = prod((task.region_hi - task.region_lo).tolist())
    return held == region


def _split(task: _Task, axis: int) -> tuple[Ints, Ints, Ints, Ints] | None:
    """Order and group borders along an axis such that no box crosses between groups, if any.

    Returns the boxes' order, the first position of each group in it, and each group's span.
    """
    order = np.argsort(task.lo[:, axis], kind="stable")
    starts = task.lo[order, axis]
    ends = np.maximum.accumulate(task.hi[order, axis])
    firsts = np.flatnonzero(starts[1:] >= ends[:-1]) + 1
    if len(firsts) == 0:
        return None
    firsts = np.concatenate((np.zeros(1, dtype=np.int64), firsts))
    lasts = np.concatenate((firsts[1:], np.array([len(order)]))) - 1
    return order, firsts, starts[firsts], ends[lasts]


def _examine_groups(
    task: _Task, axis: int, order: Ints, firsts: Ints, starts: Ints, ends: Ints, full: bool
) -> Iterator[_Task | Fault]:
    if full:
        before = np.concatenate((task.region_lo[axis : axis + 1], ends))
        after = np.concatenate((starts, task.region_hi[axis : axis + 1]))
        for gap in np.flatnonzero(after > before)[:1]:
            yield _slab_fault(task, axis, before[gap], after[gap])
    counts = np.diff(np.concatenate((firsts, np.array([len(order)]))))
    singles = order[firsts[counts == 1]]
    if full and len(singles):
        # Groups of one box are settled together: each must span the region on the other axes.
        short = (task.lo[singles] > task.region_lo) | (task.hi[singles] < task.region_hi)
        short[:, axis] = False
        for index in singles[short.any(axis=1)][:1]:
            low, high = task.region_lo.copy(), task.region_hi.copy()
            low[axis], high[axis] = task.lo[index, axis], task.hi[index, axis]
            yield from _gap_around(task.lo[index], task.hi[index], low, high)
    for group in np.flatnonzero(counts > 1):
        members = order[firsts[group] : firsts[group] + counts[group]]
        low, high = task.region_lo.copy(), task.region_hi.copy()
        low[axis], high[axis] = starts[group], ends[group]
        yield _Task(task.ids[members], task.lo[members], task.hi[members], low, high)


def _examine_slabs(task: _Task) -> Iterator[_Task | Fault]:
    """Slices along the axis where boxes cross fewest borders, or reports an overlap."""
    best: tuple[int, int, Ints, Ints, Ints] | None = None
    for axis in range(task.lo.shape[1]):
        borders = np.unique(np.concatenate((task.lo[:, axis], task.hi[:, axis])))
        if len(borders) > 2:
            first = np.searchsorted(borders, task.lo[:, axis])
            last = np.searchsorted(borders, task.hi[:, axis])
            pieces = int((last - first).sum())
            if best is None or pieces < best[0]:
                best = (pieces, axis, borders, first, last)
    if best is None:  # two or more boxes that are all the same region
        yield _fault(task.lo[0], task.hi[0], task.ids[0], task.ids[1])
        return
    _, axis, borders, first, last = best
    per_slab = np.cumsum(np.bincount(first, minlength=len(borders)) - np.bincount(last))[:-1]
    chunk = np.cumsum(per_slab) // _SLAB_CHUNK
    for number in np.unique(chunk):
        slabs = np.flatnonzero(chunk == number)
        yield from _slab_tasks(task, axis, borders, first, last, int(slabs[0]), int(slabs[-1]) + 1)


def _slab_tasks(
    task: _Task, axis: int, borders: Ints, first: Ints, last: Ints, begin: int, end: int
) -> Iterator[_Task]:
    """One task for each of the slabs [begin, end) between neighbouring borders."""
    members = np.flatnonzero((first < end) & (last > begin))
    first, last = np.maximum(first[members], begin), np.minimum(last[members], end)
    counts = last - first
    owner = np.repeat(members, counts)
    slab = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(len(owner))
    order = np.argsort(slab, kind="stable")
    owner, slab = owner[order], slab[order]
    edges = np.searchsorted(slab, np.arange(begin, end + 1))
    for number in range(begin, end):
        inside = owner[edges[number - begin] : edges[number - begin + 1]]
        low, high = task.region_lo.copy(), task.region_hi.copy()
        low[axis], high[axis] = borders[number], borders[number + 1]
        box_lo, box_hi = task.lo[inside].copy(), task.hi[inside].copy()
        box_lo[:, axis], box_hi[:, axis] = borders[number], borders[number + 1]
        yield _Task(task.ids[inside], box_lo, box_hi, low, high)


def _gap_around(lo: Ints, hi: Ints, region_lo: Ints, region_hi: Ints) -> Iterator[Fault]:
    """A part of the region that a single box inside it leaves out, if any."""
    for axis in range(len(lo)):
        low, high = region_lo.copy(), region_hi.copy()
        if lo[axis] > region_lo[axis]:
            high[axis] = lo[axis]
        elif hi[axis] < region_hi[axis]:
            low[axis] = hi[axis]
        else:
            continue
        yield _fault(low, high)
        return


def _slab_fault(task: _Task, axis: int, start: np.int64, end: np.int64) -> Fault:
    low, high = task.region_lo.copy(), task.region_hi.copy()
    low[axis], high[axis] = start, end
    return _fault(low, high)


def _fault(lo: Ints, hi: Ints, *boxes: np.int64) -> Fault:
    return Fault(tuple(lo.tolist()), tuple((hi - lo).tolist()), tuple(int(b) for b in boxes))

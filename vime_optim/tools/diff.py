"""Compares two checkpoints bit by bit, by name, whatever format and sharding each of them has."""

from __future__ import annotations

import os
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from vime_optim.files.cores import own_cores
from vime_optim.files.geometry import Box, tiles
from vime_optim.files.items import carrier_dtype
from vime_optim.tools.bucket_layout import possible_padding
from vime_optim.tools.logical import BUCKET, Logical, View, open_view
from vime_optim.tools.progress import Advance, progress
from vime_optim.tools.reader import Bits, Checkpoint
from vime_optim.tools.scalars import compare_scalars

EQUAL, DIFFERENT, CANNOT_SAY = 0, 1, 2
DEFAULT_MEMORY_BYTES = 1 << 30
_BLOCK_BYTES = 2 * 1024 * 1024
_BLOCKS_AHEAD = 8
_MAX_THREADS = 4


@dataclass
class TensorDiff:
    """A tensor that is not the same on both sides.

    Attributes:
        max_abs_diff: of the elements that are numbers on both sides; None where shapes differ.
        values_equal: dtypes differ, yet every value is the same.
        only_padding: all differences lie where a bucket may hold padding.
    """

    name: str
    what: str
    differing_elem: int = 0
    numel: int = 0
    max_abs_diff: float | None = None
    values_equal: bool = False
    only_padding: bool = False


@dataclass
class DiffReport:
    """What `diff` found; `verdict` is also the exit status."""

    a: str
    b: str
    verdict: int = EQUAL
    compared: int = 0
    compared_bytes: int = 0
    tensors: list[TensorDiff] = field(default_factory=list)
    only_in_a: list[str] = field(default_factory=list)
    only_in_b: list[str] = field(default_factory=list)
    scalars: list[dict[str, Any]] = field(default_factory=list)
    cannot_say: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        words = {EQUAL: "equal", DIFFERENT: "different", CANNOT_SAY: "cannot say"}
        return {**asdict(self), "result": words[self.verdict]}


def diff_checkpoints(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    show_progress: bool = False,
) -> DiffReport:
    """Compares tensors, scalars and param groups of two checkpoints.

    Args:
        memory_bytes: bound for the buffers of tensor data.

    Raises:
        CheckpointError: one side cannot be read.
    """
    report = DiffReport(str(a), str(b))
    with Checkpoint(a) as left, Checkpoint(b) as right:
        views = _views(left, right)
        names = _match_names(*views, report)
        total = sum(views[0].tensors[name].size_bytes * 2 for name in names)
        block_bytes = max(4096, min(_BLOCK_BYTES, memory_bytes // 32))
        with (
            progress("comparing", total, show_progress) as advance,
            _Pair(views, block_bytes) as pair,
        ):
            for name in names:
                found = pair.compare(name, advance)
                report.compared += 1
                report.compared_bytes += views[0].tensors[name].size_bytes
                if found is not None:
                    report.tensors.append(found)
        report.scalars = compare_scalars(left, right)
    _judge(report)
    return report


def _views(left: Checkpoint, right: Checkpoint) -> tuple[View, View]:
    """Both by parameter where both can be; buckets against buckets where one side cannot."""
    views = open_view(left), open_view(right)
    with_buckets = [
        any(".gbuf_idx_" in key for key in checkpoint.tensors) for checkpoint in (left, right)
    ]
    if all(with_buckets) and any(view.layout_problem for view in views):
        return open_view(left, prove_layout=False), open_view(right, prove_layout=False)
    return views


def _match_names(a: View, b: View, report: DiffReport) -> list[str]:
    """Names on both sides, in the order in which the first side's files hold them."""
    both = [name for name in a.tensors if name in b.tensors]
    report.only_in_a = sorted(set(a.tensors) - set(b.tensors))
    report.only_in_b = sorted(set(b.tensors) - set(a.tensors))
    for side, view, only in (("first", a, report.only_in_a), ("second", b, report.only_in_b)):
        unplaced = {name for name in only if view.tensors[name].kind == BUCKET}
        if unplaced:
            report.cannot_say.append(
                f"The {side} checkpoint's optimizer lies in {len(unplaced)} flat buckets "
                f"(dp_reshardable) and the other's does not, and the parameters cannot be found "
                f"in them: {view.layout_problem}."
            )
            only[:] = [name for name in only if name not in unplaced]
            other = report.only_in_b if side == "first" else report.only_in_a
            other[:] = [name for name in other if not name.startswith("optimizer.state.")]
    return sorted(both, key=lambda name: _file_order(a.tensors[name]))


def _file_order(tensor: Logical) -> tuple[str, int]:
    entry = tensor.entry if tensor.entry is not None else tensor.parts[0].bucket
    places = [chunk.location for chunk in entry.chunks if chunk.location is not None]
    return min(((p.file, p.offset_bytes) for p in places), default=("", 0))


def _judge(report: DiffReport) -> None:
    padding_only = [t for t in report.tensors if t.only_padding]
    if padding_only:
        report.cannot_say.append(
            f"{len(padding_only)} buckets differ only where padding may lie, and the layout that "
            f"would tell padding from parameters is not known."
        )
    certain = len(report.tensors) - len(padding_only)
    if certain or report.only_in_a or report.only_in_b or report.scalars:
        report.verdict = DIFFERENT
    elif report.cannot_say:
        report.verdict = CANNOT_SAY


@dataclass
class _Worker:
    """What one thread reads with: files and buffers of its own."""

    views: list[View]
    buffers: list[Bits]

    def read(self, tensors: tuple[Logical, Logical], box: Box) -> list[Bits]:
        """Bits of the same box on both sides; valid until the next call."""
        return [
            view.read(tensor, box, buffer.view(carrier_dtype(tensor.dtype))).reshape(-1)
            for view, tensor, buffer in zip(self.views, tensors, self.buffers, strict=True)
        ]


class _Pair:
    """Compares both sides block by block, a block a thread at a time.

    A thread reads a block of both sides and compares it at once, while it is in the cache.
    """

    def __init__(self, views: tuple[View, View], block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._views = views
        self._workers: list[_Worker] = []
        self._own = threading.local()
        # A thread keeps a core busy with Python and the copy from the page cache; more threads
        # than half the cores slow each other down.
        self._count = max(1, min(_MAX_THREADS, own_cores() // 2))
        self._threads = ThreadPoolExecutor(self._count, initializer=self._make_worker)

    def _make_worker(self) -> None:
        views = [replace(view, checkpoint=view.checkpoint.clone()) for view in self._views]
        buffers = [np.empty(self._block_bytes, np.uint8) for _ in views]
        self._own.worker = _Worker(views, buffers)
        self._workers.append(self._own.worker)

    def __enter__(self) -> _Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            for view in worker.views:
                view.checkpoint.close()

    def compare(self, name: str, advance: Advance) -> TensorDiff | None:
        a, b = (view.tensors[name] for view in self._views)
        if a.shape != b.shape:
            return TensorDiff(name, f"shape {a.shape} against {b.shape}", numel=a.numel)
        for view, tensor in zip(self._views, (a, b), strict=True):
            if tensor.entry is not None:
                view.checkpoint.check_cover(tensor.entry)
        found = TensorDiff(name, "values", numel=a.numel)
        if a.dtype != b.dtype:
            found.what = f"dtype {a.dtype} against {b.dtype}"
        padding = list(possible_padding(a.entry)) if a.kind == BUCKET and a.entry else []
        outside = start = 0
        limit_elem = max(1, self._block_bytes // max(a.dtype.itemsize, b.dtype.itemsize))
        running: deque[Future[tuple[TensorDiff, int]]] = deque()
        for box in tiles(a.shape, limit_elem):
            running.append(self._threads.submit(self._compare_block, (a, b), start, box, padding))
            start += box.numel
            if len(running) > _BLOCKS_AHEAD * self._count:
                outside += _merge(found, running.popleft().result(), advance)
        while running:
            outside += _merge(found, running.popleft().result(), advance)
        if a.dtype != b.dtype:
            found.values_equal = found.differing_elem == 0
            return found
        found.only_padding = bool(padding) and outside == 0
        return found if found.differing_elem else None

    def _compare_block(
        self,
        tensors: tuple[Logical, Logical],
        start: int,
        box: Box,
        padding: list[tuple[int, int]],
    ) -> tuple[TensorDiff, int]:
        """Differences of a block, its bytes as `numel`, and how many lie outside padding."""
        left, right = self._own.worker.read(tensors, box)
        found = TensorDiff("", "", numel=left.nbytes + right.nbytes)
        if tensors[0].dtype == tensors[1].dtype:
            return found, _count_bits(found, start, left, right, tensors[0].dtype, padding)
        _count_values(found, left, tensors[0].dtype, right, tensors[1].dtype)
        return found, 0


def _merge(found: TensorDiff, part: tuple[TensorDiff, int], advance: Advance) -> int:
    more, outside = part
    advance(more.numel)
    found.differing_elem += more.differing_elem
    if more.max_abs_diff is not None:
        found.max_abs_diff = max(found.max_abs_diff or 0.0, more.max_abs_diff)
    return outside


def _same_bytes(left: Bits, right: Bits) -> bool:
    """Eight bytes at a time: numpy's comparison writes a boolean for each element."""
    if left.nbytes != right.nbytes:
        return False
    a, b = (np.ascontiguousarray(side).reshape(-1).view(np.uint8) for side in (left, right))
    wide = len(a) & -8
    return np.array_equal(a[:wide].view(np.uint64), b[:wide].view(np.uint64)) and np.array_equal(
        a[wide:], b[wide:]
    )


def _count_bits(
    found: TensorDiff,
    start: int,
    left: Bits,
    right: Bits,
    dtype: torch.dtype,
    padding: list[tuple[int, int]],
) -> int:
    """Adds a block's differences to `found`; returns how many lie outside possible padding."""
    if _same_bytes(left, right):
        return 0
    unequal = left != right
    found.differing_elem += int(np.count_nonzero(unequal))
    _add_distance(found, _numbers(left[unequal], dtype), _numbers(right[unequal], dtype))
    for low, high in padding:
        unequal[max(0, low - start) : max(0, high - start)] = False
    return int(np.count_nonzero(unequal))


def _count_values(
    found: TensorDiff, left: Bits, left_dtype: torch.dtype, right: Bits, right_dtype: torch.dtype
) -> None:
    a, b = _numbers(left, left_dtype), _numbers(right, right_dtype)
    unequal = (a != b) & ~(np.isnan(a) & np.isnan(b))
    found.differing_elem += int(np.count_nonzero(unequal))
    _add_distance(found, a[unequal], b[unequal])


def _numbers(bits: Bits, dtype: torch.dtype) -> Bits:
    """float64 values of raw bits."""
    values = torch.from_numpy(bits.copy()).view(dtype)
    numbers = values.real if values.is_complex() else values
    return np.asarray(numbers.to(torch.float64).numpy())


def _add_distance(found: TensorDiff, a: Bits, b: Bits) -> None:
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(a - b)
    distance = distance[~np.isnan(distance)]
    if distance.size:
        found.max_abs_diff = max(found.max_abs_diff or 0.0, float(distance.max()))

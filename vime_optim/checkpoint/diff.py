"""Compares two checkpoints bit by bit, by name, whatever format and sharding each of them has."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from vime_optim.checkpoint.boxes import tiles
from vime_optim.checkpoint.bucket_layout import possible_padding
from vime_optim.checkpoint.items import carrier_dtype
from vime_optim.checkpoint.logical import BUCKET, Logical, View, open_view
from vime_optim.checkpoint.progress import Advance, progress
from vime_optim.checkpoint.reader import Checkpoint
from vime_optim.checkpoint.scalars import compare_scalars

EQUAL, DIFFERENT, CANNOT_SAY = 0, 1, 2
DEFAULT_MEMORY_BYTES = 1 << 30
_BLOCK_BYTES = 4 * 1024 * 1024

Bits = np.ndarray[Any, Any]


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
        with progress("comparing", total, show_progress) as advance, _Pair(views) as pair:
            for name in names:
                found = pair.compare(name, block_bytes, advance)
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
    entry = tensor.entry if tensor.entry is not None else tensor.pieces[0].bucket
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


class _Pair:
    """Reads the same boxes of both sides, one thread a side, one block ahead of the comparison."""

    def __init__(self, views: tuple[View, View]) -> None:
        self._views = views
        self._threads = tuple(ThreadPoolExecutor(1) for _ in views)
        self._buffers: dict[tuple[int, int], Bits] = {}

    def __enter__(self) -> _Pair:
        return self

    def __exit__(self, *_: object) -> None:
        for threads in self._threads:
            threads.shutdown(wait=True, cancel_futures=True)

    def compare(self, name: str, block_bytes: int, advance: Advance) -> TensorDiff | None:
        a, b = (view.tensors[name] for view in self._views)
        if a.shape != b.shape:
            return TensorDiff(name, f"shape {a.shape} against {b.shape}", numel=a.numel)
        widest = max(a.dtype.itemsize, b.dtype.itemsize)
        found = TensorDiff(name, "values", numel=a.numel)
        if a.dtype != b.dtype:
            found.what = f"dtype {a.dtype} against {b.dtype}"
        padding = list(possible_padding(a.entry)) if a.kind == BUCKET and a.entry else []
        outside = 0
        for start, left, right in self._blocks(a, b, block_bytes // widest):
            if a.dtype != b.dtype:
                _count_values(found, left, a.dtype, right, b.dtype)
            else:
                outside += _count_bits(found, start, left, right, a.dtype, padding)
            advance(left.nbytes + right.nbytes)
        if a.dtype != b.dtype:
            found.values_equal = found.differing_elem == 0
            return found
        found.only_padding = bool(padding) and outside == 0
        return found if found.differing_elem else None

    def _blocks(self, a: Logical, b: Logical, limit_elem: int) -> Iterator[tuple[int, Bits, Bits]]:
        """(flat start, bits of a, bits of b) of every block; valid until the next but one."""
        boxes = tiles(a.shape, max(1, limit_elem))
        pending: list[Any] = []
        start = 0
        for number, box in enumerate(boxes):
            pending.append(
                [
                    self._threads[side].submit(
                        self._views[side].read, t, box, self._buffer(t, side, number, limit_elem)
                    )
                    for side, t in enumerate((a, b))
                ]
            )
            if len(pending) == 2:
                yield start, *(f.result().reshape(-1) for f in pending[0])
                start += pending.pop(0)[0].result().size
        for futures in pending:
            yield start, *(f.result().reshape(-1) for f in futures)

    def _buffer(self, tensor: Logical, side: int, number: int, limit_elem: int) -> Bits:
        """One of three buffers a side: one compared, one read, one done being looked at."""
        dtype = carrier_dtype(tensor.dtype)
        size = max(1, min(limit_elem, tensor.numel)) * dtype.itemsize
        raw = self._buffers.get((side, number % 3))
        if raw is None or raw.nbytes < size:
            raw = self._buffers[side, number % 3] = np.empty(size, np.uint8)
        return raw[:size].view(dtype)


def _memcmp() -> Any:
    try:
        function = ctypes.CDLL(None).memcmp
    except (OSError, AttributeError, TypeError):  # no C library by that name
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    function.restype = ctypes.c_int
    return function


_MEMCMP = _memcmp()


def _same_bytes(left: Bits, right: Bits) -> bool:
    """Three times as fast as numpy's comparison, which writes an array of booleans."""
    contiguous = left.flags.c_contiguous and right.flags.c_contiguous
    if _MEMCMP is None or not contiguous or left.nbytes != right.nbytes:
        return bool(np.array_equal(left, right))
    return bool(_MEMCMP(left.ctypes.data, right.ctypes.data, left.nbytes) == 0)


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

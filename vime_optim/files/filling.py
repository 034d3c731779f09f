"""A box of a stored chunk, and the calls that read it into memory.

Nothing here is of torch but a dtype; any thread may call `fill`. reading.py says which thread does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from vime_optim.errors import CheckpointError
from vime_optim.files.geometry import Box, Comb, combs, extent, row_major
from vime_optim.files.plain import unreadable

# Short runs of elements with short gaps in between are read in one go, gaps included: a call costs
# as much as reading some more, and file systems read whole pages anyway.
_GAP_BYTES = 16 << 10
_RUN_BYTES = 64 << 10
_SPAN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """A box of a chunk in a file.

    Attributes:
        path: the file.
        key: the checkpoint key, for errors.
        dtype: as stored.
        start_bytes: where the chunk's first element lies in the file.
        shape: the chunk's shape.
        offset: the box's first index in the chunk, along each axis.
        size: the box's length along each axis.
    """

    path: str
    key: str
    dtype: torch.dtype
    start_bytes: int
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.size)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def span(self, box: Box) -> tuple[int, int]:
        """The bytes of the file from the first to the last element of a box of the chunk."""
        strides = row_major(self.shape)
        first = sum(o * step for o, step in zip(box.offset, strides, strict=True))
        start = self.start_bytes + first * self.dtype.itemsize
        return start, start + extent(box.size, strides) * self.dtype.itemsize


def fill(
    descriptor: int, source: Source, strides: Sequence[int], box: Box, out: memoryview
) -> None:
    """Read a box of the source's chunk, of these strides, into `out`, contiguous.

    Any thread may call it: it only reads. `out` has the box's size in bytes.

    Raises:
        CheckpointError: the file cannot be read, or ends early.
    """
    itemsize = source.dtype.itemsize
    done = 0
    for comb in combs(strides, box):
        nbytes = comb.numel * itemsize
        _read_comb(descriptor, source, comb, out[done : done + nbytes])
        done += nbytes


def _read_comb(descriptor: int, source: Source, comb: Comb, out: memoryview) -> None:
    itemsize = source.dtype.itemsize
    at = source.start_bytes + comb.start * itemsize
    run, step = comb.run * itemsize, comb.step * itemsize
    if comb.count == 1 or step == run:
        _read(descriptor, source, at, out)
    elif run >= _RUN_BYTES or step - run > _GAP_BYTES:
        for number in range(comb.count):
            _read(descriptor, source, at + number * step, out[number * run : (number + 1) * run])
    else:
        rows = max(1, _SPAN_BYTES // step)
        target = np.frombuffer(out, dtype=np.uint8).reshape(comb.count, run)
        span = np.empty(rows * step, dtype=np.uint8)
        for first in range(0, comb.count, rows):
            count = min(rows, comb.count - first)
            used = span[: (count - 1) * step + run]  # the last gap may reach out of the chunk
            _read(descriptor, source, at + first * step, used.data)
            target[first : first + count] = np.lib.stride_tricks.as_strided(
                span, (count, run), (step, 1), writeable=False
            )


def _read(descriptor: int, source: Source, at: int, out: memoryview) -> None:
    where = f"{source.path}: {source.key}"
    done = 0
    while done < len(out):
        try:
            count = os.preadv(descriptor, [out[done:]], at + done)
        except OSError as error:
            raise unreadable(where, error) from error
        if count <= 0:
            raise ends_early(where, at + done, at + len(out))
        done += count


def ends_early(where: str, size_bytes: int, needed_bytes: int) -> CheckpointError:
    """The error for a file that is shorter than the tensor in it needs."""
    return CheckpointError(
        "a file of the checkpoint ends before its tensor does",
        where=where,
        got=f"{size_bytes} bytes",
        expected=f"at least {needed_bytes} bytes",
        next_step="copy the file again from its source, or load another checkpoint",
    )

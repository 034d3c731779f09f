"""Plans and shards as columns of integers: what ranks send to one another, in few bytes.

A rank's plan of sixty chunks is about 10 kB as pickled objects, and under 1 kB as columns. Rank 0
works on the columns; an object that somebody asks for is made then, equal to the one that was sent.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vime_optim.files.cover import Ints

_LEVEL = 9  # of a few kB: 0.2 ms
_TYPES = (np.int8, np.int16, np.int32, np.int64)


def pack(constants: Any, arrays: Sequence[Ints]) -> bytes:
    """Constants and int64 arrays as bytes; axes of a table are stored one after the other."""
    columns = []
    for array in arrays:
        low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
        kind = next(t for t in _TYPES if np.iinfo(t).min <= low and high <= np.iinfo(t).max)
        columns.append((array.shape, np.dtype(kind).char, array.astype(kind).T.tobytes()))
    return zlib.compress(pickle.dumps((constants, columns), protocol=5), _LEVEL)


def unpack(data: bytes) -> tuple[Any, list[Ints]]:
    """The reverse of `pack`. Data of ranks of this job, which torch's collectives unpickle too."""
    constants, columns = pickle.loads(zlib.decompress(data))
    arrays = []
    for shape, kind, raw in columns:
        array = np.frombuffer(raw, dtype=np.dtype(kind)).reshape(shape[::-1]).T
        arrays.append(array.astype(np.int64))
    return constants, arrays


@dataclass(frozen=True, slots=True)
class Boxes:
    """Chunks of some keys on one rank, in the order of that rank's plan.

    Attributes:
        keys: each key once, in order of first appearance.
        shapes: the whole tensor's shape of each key; None for an object.
        kinds: what else is the same for all chunks of a key, by key.
        key_of: int64 [items], number of the key.
        hints: int64 [items], the index hint; -1 for none.
        lo, size: by number of axes: int64 [chunks with so many axes, axes], in order.
    """

    keys: tuple[str, ...]
    shapes: tuple[tuple[int, ...] | None, ...]
    kinds: tuple[Any, ...]
    key_of: Ints
    hints: Ints
    lo: dict[int, Ints]
    size: dict[int, Ints]

    @property
    def axes_of(self) -> Ints:
        """Axes of each item; -1 for an object."""
        axes = np.array([-1 if s is None else len(s) for s in self.shapes], dtype=np.int64)
        return axes[self.key_of] if len(axes) else self.key_of

    def to_bytes(self) -> bytes:
        kinds: dict[Any, int] = {}
        numbers = np.array([kinds.setdefault(kind, len(kinds)) for kind in self.kinds], np.int64)
        axes = sorted(self.lo)
        constants = (self.keys, self.shapes, tuple(kinds), axes)
        tables = [table for n in axes for table in (self.lo[n], self.size[n])]
        return pack(constants, [self.key_of, self.hints, numbers, *tables])

    @classmethod
    def from_bytes(cls, data: bytes) -> Boxes:
        (keys, shapes, kinds, axes), (key_of, hints, numbers, *tables) = unpack(data)
        return cls(
            keys,
            shapes,
            tuple(kinds[n] for n in numbers.tolist()),
            key_of,
            hints,
            dict(zip(axes, tables[::2], strict=True)),
            dict(zip(axes, tables[1::2], strict=True)),
        )

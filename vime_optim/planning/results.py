"""What ranks report of the files they wrote, as columns.

A rank's report of sixty items is about 7 kB as pickled objects, and a tenth of it as columns. The
coordinator works on the columns of all ranks; an object that somebody asks for is made then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vime_optim.commit.task import RecordedResult
from vime_optim.files.cover import Ints, as_array
from vime_optim.files.fastfile import FileRecord
from vime_optim.planning.packed import pack, unpack

_NONE = -1


@dataclass(frozen=True, eq=False)
class Results(Sequence[RecordedResult]):
    """One rank's WriteResults, in its order. Pickled as columns.

    Attributes:
        keys, files: each name once.
        records: one for each file, in the order of `files`.
        columns: int64 [items] each, the number of the key, its hint (-1
            for none), the number of the file, where in it the item begins and how long it is
            (bytes), the axes of its offset (-1 for an object, which has none), and whether it
            carries its file's record.
        lo: by number of axes, the offsets: int64 [items with so many axes, axes].
    """

    keys: tuple[str, ...]
    files: tuple[str, ...]
    records: tuple[FileRecord, ...]
    columns: tuple[Ints, ...]
    lo: dict[int, Ints]

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, at: Any) -> Any:
        return list(self)[at]

    def __iter__(self) -> Iterator[RecordedResult]:
        from torch.distributed.checkpoint.filesystem import _StorageInfo
        from torch.distributed.checkpoint.metadata import MetadataIndex

        offsets = {axes: iter(table.tolist()) for axes, table in self.lo.items()}
        rows = zip(*(column.tolist() for column in self.columns), strict=True)
        for key, hint, file, start, length, axes, is_last in rows:
            offset = None if axes == _NONE else next(offsets[axes])
            index = MetadataIndex(self.keys[key], offset, None if hint == _NONE else hint)
            info = _StorageInfo(self.files[file], start, length)
            record = self.records[file] if is_last else None
            yield RecordedResult(index, length, info, record)

    def __reduce__(self) -> Any:
        axes = sorted(self.lo)
        constants = (self.keys, self.files, self.records, axes)
        tables = [self.lo[n] for n in axes]
        return _received, (pack(constants, [*self.columns, *tables]),)


def _received(data: bytes) -> Results:
    (keys, files, records, axes), columns = unpack(data)
    return Results(
        keys, files, records, tuple(columns[:7]), dict(zip(axes, columns[7:], strict=True))
    )


def pack_results(results: Any) -> Any:
    """A rank's results as columns; as they came where they are not what our writer reports."""
    if type(results) is not list or any(type(r) is not RecordedResult for r in results):
        return results
    keys: dict[str, int] = {}
    files: dict[str, int] = {}
    records: dict[str, FileRecord] = {}
    rows: list[tuple[int, ...]] = []
    tables: dict[int, list[Sequence[int]]] = {}
    for result in results:
        index, info = result.index, result.storage_data
        if getattr(info, "transform_descriptors", None):
            return results
        axes = _NONE
        if index.offset is not None:
            axes = len(index.offset)
            tables.setdefault(axes, []).append(index.offset)
        if result.record is not None:
            records[info.relative_path] = result.record
        rows.append(
            (
                keys.setdefault(index.fqn, len(keys)),
                _NONE if index.index is None else index.index,
                files.setdefault(info.relative_path, len(files)),
                info.offset,
                info.length,
                axes,
                int(result.record is not None),
            )
        )
    if set(records) != set(files) or sum(row[-1] for row in rows) != len(files):
        return results
    lo = {axes: as_array(offsets, axes) for axes, offsets in tables.items()}
    columns = tuple(np.array(rows, dtype=np.int64).reshape(len(rows), 7).T.copy())
    return Results(tuple(keys), tuple(files), tuple(records[f] for f in files), columns, lo)

"""`.metadata` from columns: the same pickle to read, written in a fraction of the time.

torch makes an object for each chunk and for each place in a file, and pickles them one by one:
fifteen seconds for a quarter of a million. Here numpy writes them (`records`). What is read back is
equal to what torch would have written.
"""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from vime_optim.files.cover import Ints
from vime_optim.files.plain import write_whole
from vime_optim.planning.records import Column, Writer, get
from vime_optim.planning.results import Results
from vime_optim.planning.save_plans import LazyChunks


def write_metadata(
    original: Callable[[Any, Any, Any], None], writer: Any, metadata: Any, results: Sequence[Any]
) -> None:
    """What `FileSystemWriterAsync.finish` does, in less time where all is in columns.

    Args:
        original: Megatron's `finish`; what it adds to the metadata stays its own.
        results: of all ranks.
    """
    if _in_columns(metadata, results) and hasattr(writer, "path"):
        vars(metadata).update(_added(original, writer))
        data = metadata_bytes(metadata, results)
        if data is not None:
            write_whole(Path(writer.checkpoint_dir) / ".metadata", data)
            return
    for value in metadata.state_dict_metadata.values():
        if isinstance(getattr(value, "chunks", None), LazyChunks):
            value.chunks = list(value.chunks)  # the file is then torch's own to the byte
    original(writer, metadata, results)


def _added(original: Callable[[Any, Any, Any], None], writer: Any) -> dict[str, Any]:
    """What `finish` adds to metadata. The file that it makes is never seen under the name of a
    checkpoint: without chunks, it would be taken for one that is whole."""
    bare, path = Metadata({}), writer.path
    before = dict(vars(bare))
    with tempfile.TemporaryDirectory(prefix=".metadata.", dir=writer.checkpoint_dir) as aside:
        writer.path = Path(aside)
        try:
            original(writer, bare, [])
        finally:
            writer.path = path
    return {name: value for name, value in vars(bare).items() if value is not before.get(name)}


def _in_columns(metadata: Any, results: Sequence[Any]) -> bool:
    tensors = metadata.state_dict_metadata.values()
    return all(type(each) is Results for each in results) and all(
        isinstance(value.chunks, LazyChunks)
        for value in tensors
        if isinstance(value, TensorStorageMetadata)
    )


def metadata_bytes(metadata: Metadata, results: Sequence[Results]) -> bytes | None:
    """The pickle of `metadata`, with the places that the results of all ranks tell; None where
    torch's classes are pickled in a way that is not understood."""
    try:
        return b"".join(_parts(metadata, results))
    except (ValueError, KeyError, AttributeError):
        return None


def _parts(metadata: Metadata, results: Sequence[Results]) -> Iterator[bytes]:
    # The other attributes may be large (the plans of all ranks): they are not looked through.
    others = dict(vars(metadata))
    entries = others.pop("state_dict_metadata")
    del others["storage_data"]
    writer = Writer(list(others.values()))
    size = torch.Size((1, 1))
    chunk, place = ChunkStorageMetadata(size, size), MetadataIndex("", size, 1)
    writer.know([chunk, place, _StorageInfo("", 1, 1)])
    parts = _Parts(writer)
    held = dict(zip(others, writer.of_others, strict=True))
    held["state_dict_metadata"] = b"".join(parts.entries(entries))
    held["storage_data"] = b"".join(parts.places(results))
    whole, names = copy.copy(metadata), list(vars(metadata))

    def make(samples: Sequence[Any]) -> Metadata:
        vars(whole).update(zip(names, samples, strict=True))
        return whole

    head, *behind = writer.around(make, len(names))
    yield from (writer.said(), head)
    for name, after in zip(names, behind, strict=True):
        yield from (held[name], after)
    yield pickle.STOP


class _Parts:
    """The parts of the pickle of one save's metadata."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self._numbers: dict[Any, int] = {}

    def _number(self, value: Any) -> int:
        """Of what many parts refer to: a name, a size, or the properties of tensors."""
        known = value if isinstance(value, (str, torch.Size)) else id(value)
        if known not in self._numbers:
            self._numbers[known] = self.writer.number(value)
        return self._numbers[known]

    def _column(self, columns: Iterable[tuple[Sequence[str], Ints]]) -> Ints:
        """A column of all ranks, which numbers their own names, as numbers of the memo."""
        numbers = [
            np.array([self._number(name) for name in names], dtype=np.int64)[column]
            for names, column in columns
        ]
        return np.concatenate(numbers)

    def entries(self, entries: dict[str, Any]) -> Iterator[bytes]:
        """The dict of what each key is."""
        begin, before_size, before_chunks, end = self.writer.around(
            lambda values: TensorStorageMetadata(*values), 3
        )
        (an_object,) = self.writer.around(lambda _: BytesStorageMetadata(), 0)
        tensors: list[Any] = [v for v in entries.values() if isinstance(v, TensorStorageMetadata)]
        chunks = self._chunks([value.chunks for value in tensors])
        yield b"}("
        for key, value in entries.items():
            yield get(self._number(key))
            if isinstance(value, TensorStorageMetadata):
                yield begin + get(self._number(value.properties))
                yield before_size + get(self._number(value.size))
                yield before_chunks + b"](" + next(chunks) + b"e" + end
            else:
                yield an_object
        yield b"u"

    def _chunks(self, chunks: Sequence[LazyChunks]) -> Iterator[bytes]:
        """The chunks of each tensor; those of equally many axes have one form."""
        rows = {axes: self._rows(chunks, axes) for axes in {c.lo.shape[1] for c in chunks}}
        begin = dict.fromkeys(rows, 0)
        for each in chunks:
            axes = each.lo.shape[1]
            end = begin[axes] + len(each)
            yield bytes(rows[axes][begin[axes] : end])
            begin[axes] = end

    def _rows(self, chunks: Sequence[LazyChunks], axes: int) -> Any:
        among = [each for each in chunks if each.lo.shape[1] == axes]
        lo = np.concatenate([each.lo for each in among])
        size = np.concatenate([each.size for each in among])
        return self.writer.rows(
            lambda v: ChunkStorageMetadata(torch.Size(v[:axes]), torch.Size(v[axes:])),
            [Column(column) for column in (*lo.T, *size.T)],
            len(lo),
        )

    def places(self, results: Sequence[Results]) -> Iterator[bytes]:
        """The dict of each item's place, all items of one form together."""
        yield b"}"
        if not results:
            return
        _, hints, _, start, length, axes_of, _ = (
            np.concatenate(column)
            for column in zip(*(each.columns for each in results), strict=True)
        )
        key_of = self._column((each.keys, each.columns[0]) for each in results)
        file_of = self._column((each.files, each.columns[2]) for each in results)
        for axes in sorted(set(axes_of.tolist())):
            lo = None if axes < 0 else np.concatenate([r.lo[axes] for r in results if axes in r.lo])
            for hinted in (False, True):
                among = axes_of == axes
                at = np.flatnonzero(among & ((hints >= 0) == hinted))
                if len(at):
                    offset = None if lo is None else lo[(hints[among] >= 0) == hinted].T
                    index = self._index(key_of[at], offset, hints[at] if hinted else None)
                    columns = [
                        Column(file_of[at], said=True),
                        Column(start[at]),
                        Column(length[at]),
                    ]
                    info = self.writer.rows(lambda v: _StorageInfo(*v), columns, len(at))
                    yield b"(" + bytes(np.concatenate((index, info), axis=1)) + b"u"

    def _index(self, key: Ints, offset: Any, hint: Ints | None) -> Any:
        axes = 0 if offset is None else len(offset)
        columns = [Column(key, said=True), *map(Column, () if offset is None else offset)]
        if hint is not None:
            columns.append(Column(hint))

        def make(v: Sequence[Any]) -> MetadataIndex:
            place = None if offset is None else torch.Size(v[1 : 1 + axes])
            return MetadataIndex(v[0], place, None if hint is None else v[1 + axes])

        return self.writer.rows(make, columns, len(key))

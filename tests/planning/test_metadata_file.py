"""`.metadata` and results from columns: what is read is equal to what torch's objects give."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from vime_optim.commit.task import RecordedResult
from vime_optim.files.dcp_metadata import load_metadata
from vime_optim.files.fastfile import FileRecord
from vime_optim.planning import metadata_file, records
from vime_optim.planning.metadata_file import metadata_bytes, write_metadata
from vime_optim.planning.results import Results, pack_results
from vime_optim.planning.save_plans import LazyChunks

# Both widths of numbers, and the border between them.
numbers = st.one_of(st.integers(0, 300), st.sampled_from([2**31 - 1, 2**31, 2**40 + 5, 2**62]))


@st.composite
def saves(draw: Any) -> tuple[Metadata, list[list[RecordedResult]]]:
    """Metadata with chunks in columns, and what two ranks report of writing them."""
    entries: dict[str, Any] = {}
    ranks: list[list[RecordedResult]] = [[], []]
    properties = [TensorProperties(torch.float32), TensorProperties(torch.bfloat16)]

    def report(index: MetadataIndex) -> None:
        rank = draw(st.integers(0, 1))
        info = _StorageInfo(f"__{rank}_0.distcp", draw(numbers), draw(numbers))
        ranks[rank].append(RecordedResult(index, info.length, info))

    for key in draw(st.lists(st.text(min_size=1, max_size=4), max_size=5, unique=True)):
        axes = draw(st.integers(-1, 5))
        if axes < 0:
            entries[key] = BytesStorageMetadata()
            report(MetadataIndex(key))
            continue
        cells = st.lists(numbers, min_size=axes, max_size=axes)
        offsets = draw(st.lists(cells, min_size=1, max_size=3, unique_by=tuple))
        sizes = [draw(cells) for _ in offsets]
        count = len(offsets)
        lo, size = (np.array(table, np.int64).reshape(count, axes) for table in (offsets, sizes))
        whole = torch.Size(draw(cells))
        kind = draw(st.sampled_from(properties))
        entries[key] = TensorStorageMetadata(kind, whole, LazyChunks(lo, size))  # type: ignore[arg-type]
        for number in range(count):
            hint = draw(st.one_of(st.none(), st.just(number)))
            report(MetadataIndex(key, lo[number].tolist(), hint))
    for rank, results in enumerate(ranks):
        if results:
            record = FileRecord(f"__{rank}_0.distcp", draw(numbers), f"{rank:032x}", bytes(8))
            last = results[-1]
            results[-1] = RecordedResult(last.index, last.size_in_bytes, last.storage_data, record)
    planner_data = draw(st.sampled_from([None, {"a": ("b", 1)}]))
    return Metadata(entries, planner_data), [results for results in ranks if results]


def stock(metadata: Metadata, results: list[list[RecordedResult]]) -> bytes:
    """As torch's `FileSystemWriter.finish` pickles it."""
    lists = {
        key: TensorStorageMetadata(value.properties, value.size, list(value.chunks))
        if isinstance(value, TensorStorageMetadata)
        else value
        for key, value in metadata.state_dict_metadata.items()
    }
    places = {r.index: r.storage_data for rank in results for r in rank}
    return pickle.dumps(Metadata(lists, metadata.planner_data, places))


def hints_of(metadata: Metadata) -> dict[Any, Any]:
    """`index` is no part of the equality of MetadataIndex."""
    return {(key.fqn, key.offset): key.index for key in metadata.storage_data}


@settings(max_examples=150, deadline=None)
@given(saves())
def test_what_is_read_is_what_torch_writes(save: Any) -> None:
    metadata, results = save
    sent = [pickle.loads(pickle.dumps(pack_results(rank))) for rank in results]
    data = metadata_bytes(metadata, sent)
    assert data is not None
    ours, theirs = pickle.loads(data), pickle.loads(stock(metadata, results))
    assert ours == theirs
    assert hints_of(ours) == hints_of(theirs)
    for key, value in ours.state_dict_metadata.items():
        assert type(getattr(value, "chunks", [])) is list, key
    assert load_metadata(data) == load_metadata(stock(metadata, results))


@settings(max_examples=100, deadline=None)
@given(saves())
def test_results_arrive_as_they_were(save: Any) -> None:
    for results in save[1]:
        sent = pack_results(results)
        assert type(sent) is Results
        received = list(pickle.loads(pickle.dumps(sent)))
        assert received == results
        assert [r.index.index for r in received] == [r.index.index for r in results]
        assert [r.record for r in received] == [r.record for r in results]


def test_what_our_writer_did_not_report_is_sent_as_it_is() -> None:
    info = _StorageInfo("__0_0.distcp", 0, 1)
    foreign = [WriteResult(MetadataIndex("a"), 1, info)]
    assert pack_results(foreign) is foreign
    without_record = [RecordedResult(MetadataIndex("a"), 1, info)]
    assert pack_results(without_record) is without_record
    error = RuntimeError("disk")
    assert pack_results(error) is error


class Writer:
    """As much of a FileSystemWriterAsync as its `finish` needs here."""

    def __init__(self, directory: Path) -> None:
        self.checkpoint_dir = self.path = directory
        self.finished = 0

    def finish(self, metadata: Any, results: Any) -> None:
        self.finished += 1
        metadata.storage_data = {r.index: r.storage_data for rank in results for r in rank}
        metadata.added = "by Megatron"
        (self.path / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("understood", [True, False])
def test_without_columns_torch_writes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, understood: bool
) -> None:
    one = np.ones((1, 2), dtype=np.int64)
    value = TensorStorageMetadata(TensorProperties(), torch.Size((1, 1)), LazyChunks(one - 1, one))  # type: ignore[arg-type]
    info = _StorageInfo("__0_0.distcp", 0, 4)
    record = FileRecord("__0_0.distcp", 4, "", bytes(8))
    results = [[RecordedResult(MetadataIndex("a", (0, 0), 0), 4, info, record)]]
    if not understood:
        monkeypatch.setattr(metadata_file, "metadata_bytes", lambda *_: None)
    metadata, writer = Metadata({"a": value}), Writer(tmp_path)
    metadata.mcore_data = {"a": {"nd_reformulated_orig_global_shape": (2, 2)}}  # type: ignore[attr-defined]
    seen = []

    def finish(self: Writer, metadata: Any, results: Any) -> None:
        self.finish(metadata, results)
        path = tmp_path / ".metadata"
        seen.append(
            sorted(pickle.loads(path.read_bytes()).state_dict_metadata if path.exists() else "a")
        )

    write_metadata(finish, writer, metadata, [pack_results(rank) for rank in results])
    assert all(keys == ["a"] for keys in seen)  # whoever finds the file finds all of it
    assert [path.name for path in tmp_path.iterdir()] == [".metadata"]
    data = (tmp_path / ".metadata").read_bytes()
    assert pickle.loads(data).added == "by Megatron"
    assert pickle.loads(data).mcore_data == metadata.mcore_data  # type: ignore[attr-defined]
    assert writer.finished == (1 if understood else 2)
    assert pickle.loads(data) == pickle.loads(stock(Metadata({"a": value}), results))
    assert type(pickle.loads(data).state_dict_metadata["a"].chunks) is list
    assert load_metadata(data) == pickle.loads(data)
    assert metadata.state_dict_metadata["a"] is value


def test_what_metadata_carries_beside_chunks_is_not_looked_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Megatron keeps the plans of all ranks there: looking through their pickle takes minutes."""
    metadata = Metadata({})
    metadata.all_local_plans = [[MetadataIndex(f"key.{n}") for n in range(1000)]]  # type: ignore[attr-defined]
    looked_at = []
    opcodes = records._opcodes
    monkeypatch.setattr(records, "_opcodes", lambda data: looked_at.append(data) or opcodes(data))
    data = metadata_bytes(metadata, [])
    assert data is not None
    assert pickle.loads(data).all_local_plans == metadata.all_local_plans  # type: ignore[attr-defined]
    assert not any(b"key.1" in each for each in looked_at)

"""Chunks that a load reads from are compared: nothing wrong gets by, nothing right is refused."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from vime_optim.commit import load_check
from vime_optim.commit.load_check import Comparison
from vime_optim.errors import CheckpointError
from vime_optim.files import checked, manifest
from vime_optim.files.checked import ChunksRead
from vime_optim.files.fastfile import digest_file
from vime_optim.files.manifest import Manifest
from vime_optim.reshard import storage
from vime_optim.reshard.coded import CodedShard

CHUNK_BYTES = 1 << 12
FILE_BYTES = 10 * CHUNK_BYTES + 500


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_check, "_LEAST_CHUNK_BYTES", CHUNK_BYTES)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(random.Random(1).randbytes(FILE_BYTES))
    place = {MetadataIndex("a key"): _StorageInfo(path.name, 0, FILE_BYTES)}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({}, None, place)))
    return path


def manifest_of(*paths: Path, chunk_bytes: int = CHUNK_BYTES) -> Manifest:
    made = Manifest(chunk_bytes=chunk_bytes)
    for path in paths:
        made.add(digest_file(path, chunk_bytes=chunk_bytes))
    return made


def comparison_of(path: Path) -> Comparison:
    return Comparison(str(path.parent), manifest_of(path))


def read(comparison: Comparison, path: Path, ranges: list[tuple[int, int]]) -> None:
    with checked.noting(comparison.chunks):
        for start, end in ranges:
            checked.note(str(path), start, end)


def used_by(ranges: list[tuple[int, int]]) -> set[int]:
    return {n for a, b in ranges for n in range(a // CHUNK_BYTES, -(-b // CHUNK_BYTES))}


def noted(chunks: ChunksRead | None) -> set[int]:
    assert chunks is not None
    return set(np.flatnonzero(chunks.flags).tolist())


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        [byte] = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 4]))


def test_ranges_in_any_place_are_noted_and_right(path: Path) -> None:
    draw = random.Random(2)
    for _ in range(60):
        ends = sorted(draw.sample(range(FILE_BYTES + 1), 2 * draw.randrange(1, 6)))
        ranges = list(zip(ends[::2], ends[1::2], strict=True))
        comparison = comparison_of(path)
        read(comparison, path, ranges)
        assert noted(comparison.chunks) == used_by(ranges)
        comparison.finish()


def test_a_flip_in_a_used_chunk_raises(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In what is wanted and in what lies between; elsewhere it changes nothing."""
    ranges = [(100, 9000), (9100, 20000), (21000, 30000)]
    used = used_by(ranges)
    draw = random.Random(3)
    comparison = comparison_of(path)
    read(comparison, path, ranges)
    for _ in range(60):
        position = draw.randrange(FILE_BYTES)
        flip(path, position)
        number = position // CHUNK_BYTES
        if number in used:
            span = rf"bytes \[{number * CHUNK_BYTES}, {(number + 1) * CHUNK_BYTES}\) holding a key"
            with pytest.raises(CheckpointError, match=f"(?s)__0_0.distcp.*{span}"):
                comparison.finish()
        else:
            comparison.finish()
        flip(path, position)


def test_each_used_chunk_is_read_once_and_counted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    real = manifest.digest_of
    monkeypatch.setattr(manifest, "digest_of", lambda *a: (seen.append(a[1]), real(*a))[1])
    monkeypatch.setattr(load_check, "counters", Counter())
    comparison = comparison_of(path)
    read(comparison, path, [(2000, 3000), (3000, 3100), (FILE_BYTES - 32, FILE_BYTES)])
    comparison.finish()
    assert sorted(seen) == [0, 10 * CHUNK_BYTES]
    assert load_check.counters == {load_check.COMPARED: CHUNK_BYTES + 500}


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_share_what_any_of_them_used(
    rank: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each chunk is one rank's, whoever read from it."""
    other = comparison_of(path)
    read(other, path, [(0, 3 * CHUNK_BYTES), (8 * CHUNK_BYTES, FILE_BYTES)])
    assert other.chunks is not None
    flags = torch.from_numpy(other.chunks.flags)
    seen: list[int] = []
    real = manifest.digest_of
    monkeypatch.setattr(manifest, "digest_of", lambda *a: (seen.append(a[1]), real(*a))[1])
    distributed = torch.distributed
    monkeypatch.setattr(distributed, "all_reduce", lambda own, _: own.copy_(own.maximum(flags)))
    monkeypatch.setattr(distributed, "get_rank", lambda: rank)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(load_check.collectives, "device_of", lambda: torch.device("cpu"))
    mine = comparison_of(path)
    read(mine, path, [(5 * CHUNK_BYTES, 5 * CHUNK_BYTES + 1)])
    mine.is_shared = True
    mine.finish()
    assert sorted(at // CHUNK_BYTES for at in seen) == [0, 1, 2, 5, 8, 9, 10][rank::2]


def test_tiny_chunks_are_not_compared(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest that lies must not make many reads of large files."""
    monkeypatch.setattr(load_check, "_LEAST_CHUNK_BYTES", CHUNK_BYTES + 1)
    assert comparison_of(path).chunks is None


def test_other_files_and_other_times_are_not_noted(path: Path) -> None:
    comparison = comparison_of(path)
    checked.note(str(path), 0, 10)
    read(comparison, path.parent / "other", [(0, 10)])
    checked.note(str(path), 0, 10)
    assert noted(comparison.chunks) == set()
    read(comparison, path.parent / "." / path.name, [(0, 10), (5000, 5000)])
    assert noted(comparison.chunks) == {0}


# What a load through torch's reader, taken over, notes.


@pytest.fixture
def folder(tmp_path: Path) -> tuple[Path, Comparison]:
    """A checkpoint of torch's whose tensors lie in chunks of their own."""
    state = {key: torch.rand(64, 256) for key in ("a", "b", "c")}
    save(state, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    return tmp_path, Comparison(str(tmp_path), manifest_of(*tmp_path.glob("*.distcp")))


def place_of(folder: Path, key: str) -> tuple[Path, int, int]:
    for index, info in FileSystemReader(folder).read_metadata().storage_data.items():
        if index.fqn == key:
            return folder / info.relative_path, info.offset, info.offset + info.length
    raise KeyError(key)


class Into(DefaultLoadPlanner):
    """Reads into one tensor, whatever is asked for."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self.target = target

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return self.target


def load_noting(target: torch.Tensor, folder: Path, comparison: Comparison) -> None:
    reader = FileSystemReader(folder)
    storage.take_over(reader)
    with checked.noting(comparison.chunks):
        state = {"b": torch.zeros(64, 256)}
        load(state, storage_reader=reader, planner=Into(target), no_dist=True)


@pytest.mark.parametrize("way", ["in place", "by torch", "coded"])
def test_a_load_notes_what_it_reads(way: str, folder: tuple[Path, Comparison]) -> None:
    """Also of a coded state, whose bytes are read only when the optimizer takes it."""
    directory, comparison = folder
    shard = CodedShard(64 * 256, may_be_partial=False)
    target = {
        "in place": torch.zeros(64, 256),
        "by torch": torch.nn.Parameter(torch.zeros(64, 256), requires_grad=False),
        "coded": shard.placeholder.view(64, 256),
    }[way]
    load_noting(target, directory, comparison)
    assert bool(shard.reads) == (way == "coded")
    assert noted(comparison.chunks) == used_by([place_of(directory, "b")[1:]])


def test_the_head_and_the_tail_of_an_archive_count(
    folder: tuple[Path, Comparison], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They say what the elements are, and may lie in chunks beside theirs."""
    directory, _ = folder
    path, start, end = place_of(directory, "b")
    monkeypatch.setattr(load_check, "_LEAST_CHUNK_BYTES", 1)
    comparison = Comparison(str(directory), manifest_of(path, chunk_bytes=64))
    load_noting(torch.zeros(64, 256), directory, comparison)
    for position in (start, end - 1):
        flip(path, position)
        with pytest.raises(CheckpointError, match="digest differs"):
            comparison.finish()
        flip(path, position)
    comparison.finish()

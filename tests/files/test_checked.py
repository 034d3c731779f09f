"""Digests compared while boxes are read: nothing wrong gets by, nothing right is refused."""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vime_optim.errors import CheckpointError
from vime_optim.files import checked, filling, reading, settle
from vime_optim.files.checked import FileCheck
from vime_optim.files.fastfile import digest_file
from vime_optim.files.filling import Source
from vime_optim.files.reading import BoxReader
from vime_optim.reshard.coded import CodedShard, Read, load_shards

CHUNK_BYTES = 1 << 12
FILE_BYTES = 10 * CHUNK_BYTES + 500


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(reading, "PIECE_BYTES", 3 * CHUNK_BYTES // 2)
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(random.Random(1).randbytes(FILE_BYTES))
    return path


def check_of(path: Path) -> FileCheck:
    record = digest_file(path, chunk_bytes=CHUNK_BYTES)
    digests = record.chunk_digests
    return FileCheck(str(path), FILE_BYTES, CHUNK_BYTES, digests, lambda a, b: " holding a key")


def source(check: FileCheck, start: int, end: int) -> Source:
    shape = (end - start,)
    return Source(check.path, "key", torch.uint8, start, shape, (0,), shape, check, (start, end))


def read(check: FileCheck, ranges: list[tuple[int, int]], dtype: Any = torch.uint8) -> list[Any]:
    targets = [torch.zeros(end - start, dtype=dtype) for start, end in ranges]
    with BoxReader(0, threads=3) as reader:
        reader._slot_bytes = 700
        for (start, end), target in zip(ranges, targets, strict=True):
            reader.read(source(check, start, end), target)
    return targets


def used_by(ranges: list[tuple[int, int]]) -> set[int]:
    return {n for a, b in ranges for n in range(a // CHUNK_BYTES, -(-b // CHUNK_BYTES))}


def read_all(check: FileCheck, ranges: list[tuple[int, int]], dtype: Any) -> None:
    read(check, ranges, dtype)
    settle.compare_rest([check])


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        [byte] = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])  # straight, and through buffers
def test_ranges_in_any_place_are_read_and_compared(path: Path, dtype: torch.dtype) -> None:
    draw = random.Random(2)
    data = path.read_bytes()
    for _ in range(60):
        ends = sorted(draw.sample(range(FILE_BYTES + 1), 2 * draw.randrange(1, 6)))
        ranges = list(zip(ends[::2], ends[1::2], strict=True))
        check = check_of(path)
        for (start, end), found in zip(ranges, read(check, ranges, dtype), strict=True):
            assert found.to(torch.uint8).numpy().tobytes() == data[start:end]
        assert check.used == used_by(ranges)
        settle.compare_rest([check])
        assert check.right >= {
            n for a, b in ranges for n in range(a // CHUNK_BYTES, -(-b // CHUNK_BYTES))
        }


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_a_flip_in_a_used_chunk_raises(path: Path, dtype: torch.dtype) -> None:
    """In what is wanted and in what lies between; elsewhere it changes nothing."""
    ranges = [(100, 9000), (9100, 20000), (21000, 30000)]
    used = range(30000 // CHUNK_BYTES + 1)
    draw = random.Random(3)
    check = check_of(path)
    for _ in range(60):
        position = draw.randrange(FILE_BYTES)
        check.used.clear(), check.right.clear()
        flip(path, position)
        number = position // CHUNK_BYTES
        if number in used:
            span = rf"bytes \[{number * CHUNK_BYTES}, {(number + 1) * CHUNK_BYTES}\) holding a key"
            with pytest.raises(CheckpointError, match=f"(?s)__0_0.distcp.*{span}"):
                read_all(check, ranges, dtype)
        else:
            read_all(check, ranges, dtype)
        flip(path, position)


def test_whole_chunks_are_read_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither again at the end, nor for the digest of what was compared already."""
    check = check_of(path)
    monkeypatch.setattr(checked, "digest_of", None)
    ranges = [(64, 9000), (9064, 20000), (20064, FILE_BYTES - 32)]
    read(check, ranges)
    assert check.right == set(range(check.chunks))
    settle.compare_rest([check])
    reads: list[int] = []
    real = filling._read
    monkeypatch.setattr(
        filling, "_read", lambda d, w, at, out: (reads.append(len(out)), real(d, w, at, out))[1]
    )
    read(check, ranges)
    assert sum(reads) == sum(end - start for start, end in ranges)


def test_what_would_cost_much_is_counted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked, "FREE_BYTES", 0)
    monkeypatch.setattr(settle, "FREE_BYTES", 0)
    monkeypatch.setattr(settle, "counters", Counter())
    check = check_of(path)
    read(check, [(2000, CHUNK_BYTES), (2 * CHUNK_BYTES, 4 * CHUNK_BYTES)])
    assert check.right == {2, 3}
    settle.compare_rest([check])
    assert settle.counters == {
        settle.COMPARED: 2 * CHUNK_BYTES,
        settle.NOT_COMPARED: CHUNK_BYTES,
    }
    monkeypatch.setattr(settle, "FREE_BYTES", CHUNK_BYTES)
    read(check, [(2000, CHUNK_BYTES)])
    settle.compare_rest([check])
    assert check.right == {0, 2, 3}


def test_ranks_share_the_rest(path: Path) -> None:
    """What one has compared none compares again; of the rest each chunk is one rank's."""
    ranks = [check_of(path), check_of(path)]
    ranks[0].use(0, FILE_BYTES)
    ranks[1].use(0, 3 * CHUNK_BYTES)
    ranks[1].right |= {0, 1, 2}
    flags = [settle.flags_of([check]) for check in ranks]
    both = flags[0].clip(min=flags[1])
    for number, check in enumerate(ranks):
        settle.settle([check], both, number, 2)
    mine, other = ranks[0].right, ranks[1].right - {0, 1, 2}
    assert mine | other == set(range(3, 11))
    assert not mine & other
    assert abs(len(mine) - len(other)) <= 1


def test_a_strided_box_is_compared_at_the_end(path: Path) -> None:
    check = check_of(path)
    box = Source(str(path), "k", torch.uint8, 0, (64, 256), (0, 10), (64, 50), check, (0, 64 * 256))
    with BoxReader(0, threads=2) as reader:
        reader.read(box, torch.zeros(64, 50, dtype=torch.uint8))
    assert check.right == set()
    assert check.used == {0, 1, 2, 3}
    flip(path, 5000)  # in none of the columns
    with pytest.raises(CheckpointError, match=r"bytes \[4096, 8192\)"):
        settle.compare_rest([check])


def test_coded_shards_are_compared_when_they_are_read(path: Path) -> None:
    check = check_of(path)

    def shard(start: int, end: int) -> CodedShard:
        numel = (end - start) // 4
        made = CodedShard(numel, may_be_partial=False)
        box = Source(str(path), "key", torch.float32, start, (numel,), (0,), (numel,), check)
        made.reads.append(Read(box, (numel,), (1,), 0))
        return made

    def load() -> None:
        taken: list[torch.Tensor] = []
        shards = [shard(64, 20000), shard(20064, 37000)]  # of the last chunk only a little
        load_shards((s, torch.device("cpu"), taken.append) for s in shards)

    load()
    assert check.right == set(range(10))
    check.right.clear()
    flip(path, 39000)
    with pytest.raises(CheckpointError, match="digest differs"):
        load()


def test_ours_is_asked_by_path(path: Path) -> None:
    check = check_of(path)
    assert checked.check_of(str(path)) is None
    with checked.comparing({str(path): check}):
        assert checked.check_of(str(path.parent / "." / path.name)) is check
        assert checked.check_of(str(path) + "x") is None
    assert checked.check_of(str(path)) is None


def test_parts_are_digested_in_order(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the thread with the first part of a chunk is the slower one."""
    first = threading.Event()
    real = filling._read

    def late(descriptor: int, what: Any, at: int, out: memoryview) -> None:
        real(descriptor, what, at, out)
        if at == 0:
            first.wait(0.2)

    monkeypatch.setattr(filling, "_read", late)
    check = check_of(path)
    read(check, [(0, 1000), (1000, 2000), (2000, CHUNK_BYTES)])
    assert check.right == {0}


def test_the_head_of_an_archive_counts(path: Path) -> None:
    """It says what the elements are, and may lie in the chunk before theirs."""
    check = check_of(path)
    box = source(check, CHUNK_BYTES + 64, CHUNK_BYTES + 100)
    with BoxReader(0, threads=2) as reader:
        whole = (CHUNK_BYTES - 500, CHUNK_BYTES + 100)
        reader.read(replace(box, archive=whole), torch.zeros(36, dtype=torch.uint8))
    assert check.used == {0, 1}
    flip(path, CHUNK_BYTES - 100)
    with pytest.raises(CheckpointError, match=r"bytes \[0, 4096\)"):
        settle.compare_rest([check])

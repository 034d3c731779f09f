"""Boxes read straight from files, against what torch's own reader makes of them."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from functools import partial
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from tests.memory import counted
from vime_optim.commit import loading
from vime_optim.counters import counters
from vime_optim.errors import CheckpointError, OptimizerStateError
from vime_optim.files import filling, items, reading
from vime_optim.files.fastfile import write_file
from vime_optim.files.filling import Source
from vime_optim.files.reading import BoxReader
from vime_optim.reshard import storage
from vime_optim.reshard.coded import CodedShard, Read, load_shards
from vime_optim.tools.bits import same_bits

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)


@pytest.fixture
def no_counters() -> Iterator[None]:
    counters.clear()
    yield
    counters.clear()


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(1, prod(shape) + 1).remainder(120).to(dtype).reshape(shape)


@st.composite
def boxes(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=4)))
    offset = tuple(draw(st.integers(0, length - 1)) for length in shape)
    size = tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True))
    return shape, offset, size


@settings(deadline=None, max_examples=150)
@given(
    box=boxes(),
    dtype=st.sampled_from(DTYPES),
    into=st.sampled_from(DTYPES),
    strided=st.booleans(),
    small=st.sampled_from([(8, 0, 8), (64, 4, 16), (1 << 20, 4096, 1 << 20)]),
)
def test_a_box_is_the_slice_of_its_chunk(
    box: Any,
    dtype: torch.dtype,
    into: torch.dtype,
    strided: bool,
    small: tuple[int, int, int],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Any box, dtype and destination, through every way of reading runs with gaps."""
    shape, offset, size = box
    chunk = numbers(shape, dtype)
    path = tmp_path_factory.mktemp("boxes") / "file"
    path.write_bytes(b"head" + bytes(chunk.reshape(-1).view(torch.uint8).tolist()))
    wide = torch.zeros((*size, 2), dtype=into)
    target = wide[..., 1] if strided else torch.zeros(size, dtype=into)
    source = Source(str(path), "key", dtype, 4, shape, offset, size)
    piece_bytes, gap_bytes, span_bytes = small
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "PIECE_BYTES", piece_bytes)
        patch.setattr(filling, "_GAP_BYTES", gap_bytes)
        patch.setattr(filling, "_SPAN_BYTES", span_bytes)
        done = []
        with BoxReader(0, threads=2) as reader:
            reader._slot_bytes = min(piece_bytes, reader._slot_bytes)
            reader.read(source, target, lambda: done.append(target.clone()))
    index = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
    expected = chunk[index].to(into)
    assert torch.equal(target, expected)
    assert torch.equal(done[0], expected)
    if strided:
        assert not wide[..., 0].any()


def test_a_large_slice_of_a_host_tensor_is_filled(tmp_path: Path) -> None:
    """Same dtype and device, but not contiguous and larger than any buffer: a cut by columns, as
    tensor parallelism makes it."""
    chunk = numbers((300, 2000), torch.float32)
    path = tmp_path / "file"
    path.write_bytes(memoryview(chunk.numpy()).cast("B"))
    whole = torch.zeros(300, 4000)
    target = whole[:, 2000:]
    with BoxReader(0, threads=2) as reader:
        reader.read(
            Source(str(path), "key", chunk.dtype, 0, (300, 2000), (0, 0), (300, 2000)), target
        )
    assert torch.equal(target, chunk)
    assert not whole[:, :2000].any()


def test_only_the_box_is_read(tmp_path: Path) -> None:
    """Rows of a chunk are read without their neighbours, and columns without theirs."""
    chunk = numbers((64, 1 << 14), torch.float32)
    path = tmp_path / "file"
    path.write_bytes(chunk.numpy().tobytes())
    for offset, size in (((5, 0), (7, 1 << 14)), ((0, 1 << 13), (64, 1 << 12))):
        target = torch.zeros(size)
        source = Source(str(path), "key", torch.float32, 0, (64, 1 << 14), offset, size)
        before = _bytes_read()
        with BoxReader(source.nbytes) as reader:
            reader.read(source, target)
        # /proc itself is read as well, a few hundred bytes.
        assert _bytes_read() - before <= source.nbytes + 4096


def _bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("rchar")))


def test_a_short_file_raises_with_its_name_and_key(tmp_path: Path) -> None:
    path = tmp_path / "short.distcp"
    path.write_bytes(bytes(100))
    source = Source(str(path), "optimizer.key", torch.float32, 0, (50,), (0,), (50,))
    message = r"(?s)short\.distcp: optimizer\.key.*200 bytes"
    with pytest.raises(CheckpointError, match=message), BoxReader(200) as reader:
        reader.read(source, torch.zeros(50))
    with pytest.raises(CheckpointError, match=r"nowhere\.distcp"), BoxReader(4) as reader:
        reader.open(str(tmp_path / "nowhere.distcp"))


def test_staging_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = reading._host_buffer

    def count(nbytes: int, pinned: bool) -> torch.Tensor:
        made.append(nbytes)
        return original(nbytes, pinned)

    monkeypatch.setattr(reading, "_host_buffer", count)
    chunk = numbers((1 << 22,), torch.float32)
    path = tmp_path / "file"
    path.write_bytes(chunk.numpy().tobytes())
    target = torch.zeros(1 << 22, dtype=torch.float64)
    source = Source(str(path), "key", torch.float32, 0, (1 << 22,), (0,), (1 << 22,))
    with BoxReader(source.nbytes) as reader:
        reader.read(source, target)
    assert sum(made) <= 1 << 20
    assert torch.equal(target, chunk.double())


def test_equal_archives_are_parsed_once(tmp_path: Path) -> None:
    """Of our writer's files one archive of each shape; of torch's every one, with the same end."""
    tensors = [numbers((6, 4), torch.float32) + number for number in range(5)]
    extents, _ = write_file(tmp_path / "ours", "ours", [*tensors, numbers((2,), torch.bfloat16)])
    with BoxReader(0) as reader:
        layouts = items.Layouts()
        descriptor = reader.open(str(tmp_path / "ours"))
        data = (tmp_path / "ours").read_bytes()
        for extent, tensor in zip(extents, tensors, strict=False):
            found = layouts.find(descriptor, extent.offset, extent.length, "here")
            raw = data[found.start_bytes : found.start_bytes + tensor.nbytes]
            assert raw == tensor.numpy().tobytes()
        assert layouts.parsed == 1
        last = extents[-1]
        found = layouts.find(descriptor, last.offset, last.length, "here")
        assert (found.dtype, found.shape, layouts.parsed) == (torch.bfloat16, (2,), 2)


def test_an_archive_of_the_same_length_but_another_shape_is_told_apart(tmp_path: Path) -> None:
    tensors = [numbers((6, 4), torch.float32), numbers((4, 6), torch.float32)]
    extents, _ = write_file(tmp_path / "ours", "ours", tensors)
    assert extents[0].length == extents[1].length
    with BoxReader(0) as reader:
        layouts = items.Layouts()
        descriptor = reader.open(str(tmp_path / "ours"))
        shapes = [layouts.find(descriptor, e.offset, e.length, "here").shape for e in extents]
    assert shapes == [(6, 4), (4, 6)]


def checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    state = {
        "weight": numbers((30, 20), torch.bfloat16),
        "moment": numbers((30, 20), torch.float32),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "turned": numbers((5, 7), torch.float32).t(),
        "bytes": {"any": "object"},
    }
    save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    return state


def load_with_ours(state: dict[str, Any], folder: Path) -> None:
    reader = FileSystemReader(folder)
    assert storage.is_understood(reader)
    storage.take_over(reader)
    load(state, storage_reader=reader, planner=DefaultLoadPlanner(), no_dist=True)


def test_a_checkpoint_of_stock_torch_loads_exactly(tmp_path: Path, no_counters: None) -> None:
    state = checkpoint(tmp_path)
    loaded: dict[str, Any] = {
        key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else {"any": ""}
        for key, value in state.items()
    }
    loaded["moment"] = loaded["moment"].to(torch.bfloat16)  # converted, as torch does
    load_with_ours(loaded, tmp_path)
    assert loaded["bytes"] == {"any": "object"}
    for key, value in state.items():
        if key == "moment":
            value = value.to(torch.bfloat16)
        if key != "bytes":
            assert same_bits(loaded[key], value), key
    # Only the tensor whose elements are not stored in its own order.
    assert sum(counters.values()) == 1


def item_of(folder: Path, key: str) -> tuple[Path, int, int]:
    metadata = FileSystemReader(folder).read_metadata()
    for index, info in metadata.storage_data.items():
        if index.fqn == key:
            return folder / info.relative_path, info.offset, info.length
    raise KeyError(key)


def test_a_truncated_file_raises_with_its_name_and_key(tmp_path: Path, no_counters: None) -> None:
    state = {"moment": numbers((30, 20), torch.float32)}
    save(state, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    path, offset, length = item_of(tmp_path, "moment")
    with path.open("r+b") as file:
        file.truncate(offset + length - 1)
    with pytest.raises(BaseException, match=f"(?s){path.name}: moment.*{offset + length} bytes"):
        load_with_ours({"moment": torch.zeros(30, 20)}, tmp_path)


@pytest.mark.parametrize("where", ["directory", "pickle"])
def test_a_corrupted_archive_raises_with_its_name_and_key(
    where: str, tmp_path: Path, no_counters: None
) -> None:
    state = {"moment": numbers((30, 20), torch.float32)}
    save(state, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    path, _, _ = item_of(tmp_path, "moment")
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\x05\x06") if where == "directory" else data.index(b"FloatStorage")
    data[at : at + 4] = b"\xff\xff\xff\xff"
    path.write_bytes(data)
    with pytest.raises(BaseException, match=f"{path.name}: moment"):
        load_with_ours({"moment": torch.zeros(30, 20)}, tmp_path)
    assert sum(counters.values()) == 1  # torch was asked as well


@pytest.mark.parametrize("change", [b"}X\x05\0\0\0shape)sb.", b"N}X\x05\0\0\0shape)s\x86b."])
def test_a_pickle_cannot_change_the_tensor_that_it_made(change: bytes) -> None:
    """BUILD would set what was looked at when the tensor was made."""
    buffer = io.BytesIO()
    torch.save(numbers((3, 4), torch.float32), buffer)
    with zipfile.ZipFile(buffer) as archive:
        data = archive.read("archive/data.pkl")
    assert items._tensor(data).shape == (3, 4)
    with pytest.raises(AttributeError):
        items._tensor(data.removesuffix(b".") + change)


def test_another_reader_is_left_alone(tmp_path: Path) -> None:
    class Other(FileSystemReader):
        def read_data(self, plan: Any, planner: Any) -> Any:
            raise NotImplementedError

    assert not storage.is_understood(Other(tmp_path))
    assert not storage.is_understood(io.BytesIO())


def test_coded_shards_take_the_memory_of_one(tmp_path: Path) -> None:
    """Eight shards of 4 MiB as float32: one of them and the reader's buffers, not eight."""
    count, numel = 8, 1 << 20
    path = tmp_path / "file"
    with path.open("wb") as file:
        for number in range(count):
            file.write(torch.full((numel,), float(number)).numpy().tobytes())
    codes = [torch.ones(numel, dtype=torch.int16) for _ in range(count)]

    def shard(number: int) -> CodedShard:
        made = CodedShard(numel, may_be_partial=False)
        source = Source(
            str(path), "key", torch.float32, 4 * number * numel, (numel,), (0,), (numel,)
        )
        made.reads.append(Read(source, (numel,), (1,), 0))
        return made

    def take(code: torch.Tensor, value: torch.Tensor) -> None:
        # In pieces, so that the code's own needs do not count.
        for start in range(0, numel, 1 << 16):
            part = value[start : start + (1 << 16)].view(torch.int32) >> 16
            code[start : start + part.numel()].copy_(part)

    shards = [shard(number) for number in range(count)]
    cpu = torch.device("cpu")
    with counted() as memory:
        load_shards((s, cpu, partial(take, c)) for s, c in zip(shards, codes, strict=True))
    for number, code in enumerate(codes):
        high = torch.tensor(float(number)).view(torch.int32) >> 16
        assert (code == high).all()
    shard_bytes = 4 * numel
    assert shard_bytes <= memory.peak_bytes <= shard_bytes + (2 << 20)
    # What it would be without: every value at once.
    with counted() as memory:
        values = [torch.empty(numel) for _ in range(count)]
    assert memory.peak_bytes >= count * shard_bytes == sum(v.nbytes for v in values)


def test_a_load_parses_metadata_once(tmp_path: Path) -> None:
    """torch asks for it two or three times; what changed, and what no load asks for, is read."""
    path = tmp_path / ".metadata"
    path.write_bytes(b"1")
    parsed: list[bytes] = []

    def ask() -> bytes:
        return loading.once(str(path), lambda: parsed.append(path.read_bytes()) or parsed[-1])

    with loading.into({}, str(tmp_path), None):
        assert [ask(), ask()] == [b"1", b"1"]
        path.write_bytes(b"two")
        assert ask() == b"two"
    assert parsed == [b"1", b"two"]
    ask()
    assert len(parsed) == 3


def test_a_chain_in_a_chain_is_whole_when_its_members_are() -> None:
    """Layer-wise Muon and Lion: the inner chain takes nothing itself."""
    leaf = SimpleNamespace()
    inner = SimpleNamespace(chained_optimizers=[leaf])
    chain = SimpleNamespace(chained_optimizers=[inner])
    state = type("State", (dict,), {"owner": chain})()
    with loading.into({"optimizer": state}, "saved", None):
        loading.reading_begins()
    with pytest.raises(OptimizerStateError, match="half of one checkpoint"):
        loading.require_whole(chain, "saved")
    loading.taken(leaf)
    loading.require_whole(chain, "saved")

"""The file writer: what torch's own reader makes of it, and what reaches the disk."""

from __future__ import annotations

import errno
import io
import os
import queue
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex

from vime_optim.async_save import units
from vime_optim.commit import task
from vime_optim.files import archive, fastfile
from vime_optim.files.window import HostWindow
from vime_optim.optimizer.update_order import UpdateOrder
from vime_optim.tools.bits import same_bits

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.uint16,
    torch.float8_e4m3fn,
]


def read(path: Path, extent: fastfile.Extent) -> torch.Tensor:
    raw = path.read_bytes()[extent.offset : extent.offset + extent.length]
    loaded: torch.Tensor = torch.load(io.BytesIO(raw), weights_only=True)
    return loaded


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    numel = int(torch.Size(shape).numel())
    itemsize = torch.empty((), dtype=dtype).itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (numel * itemsize,))
    return raw.to(torch.uint8).view(dtype).reshape(shape)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 5), max_size=4).map(tuple), st.sampled_from(range(len(DTYPES)))
        ),
        max_size=6,
    )
)
def test_torch_reads_back_every_bit(tmp_path_factory: Any, specs: list[Any]) -> None:
    path = tmp_path_factory.mktemp("file") / "x"
    tensors = [filled(shape, DTYPES[number]) for shape, number in specs]
    extents, record = fastfile.write_file(path, "x", list(tensors))
    for tensor, extent in zip(tensors, extents, strict=True):
        assert same_bits(read(path, extent), tensor)
    assert record.size_bytes == path.stat().st_size
    assert fastfile.digest_file(path).chunk_digests == record.chunk_digests
    assert fastfile.read_stamp(path) == record.stamp


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(70.0).reshape(10, 7)[2:5, 1:4],
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(9.0)[3:],
        torch.nn.Parameter(torch.rand(3)),
        torch.zeros(1, 1).expand(4, 5),
    ],
    ids=["cut", "transposed", "offset", "parameter", "expanded"],
)
def test_a_view_is_written_without_its_storage(tmp_path: Path, tensor: torch.Tensor) -> None:
    [extent], _ = fastfile.write_file(tmp_path / "x", "x", [tensor])
    loaded = read(tmp_path / "x", extent)
    assert same_bits(loaded, tensor)
    assert loaded.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    assert loaded.is_contiguous()


def test_special_tensors_go_through_torch(tmp_path: Path) -> None:
    sparse = torch.eye(3).to_sparse()
    conjugate = torch.rand(4, dtype=torch.complex64).conj()
    extents, _ = fastfile.write_file(tmp_path / "x", "x", [sparse, conjugate])
    assert torch.equal(read(tmp_path / "x", extents[0]).to_dense(), torch.eye(3))
    assert torch.equal(read(tmp_path / "x", extents[1]), conjugate)


def test_a_file_is_always_a_new_one(tmp_path: Path) -> None:
    """Hard links, readers and a writer that outlived its job keep the old file."""
    path, copy = tmp_path / "x", tmp_path / "copy"
    [extent], _ = fastfile.write_file(path, "x", [torch.arange(5.0)])
    os.link(path, copy)
    with open(path, "r+b") as zombie:
        [later], record = fastfile.write_file(path, "x", [torch.arange(5.0) + 1])
        zombie.write(b"of another job")
    assert fastfile.digest_file(path).chunk_digests == record.chunk_digests
    assert same_bits(read(path, later), torch.arange(5.0) + 1)
    fastfile.write_file(copy, "x", [torch.arange(5.0) + 2])  # and the other way round
    assert fastfile.digest_file(path).chunk_digests == record.chunk_digests
    assert same_bits(read(copy, extent), torch.arange(5.0) + 2)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"kept")
    (tmp_path / "x").symlink_to(outside)
    fastfile.write_file(tmp_path / "x", "x", [torch.arange(5.0)])
    assert outside.read_bytes() == b"kept"
    assert not (tmp_path / "x").is_symlink()


def test_bytes_are_written_as_they_are(tmp_path: Path) -> None:
    blob = io.BytesIO(b"some bytes")
    extents, _ = fastfile.write_file(tmp_path / "x", "x", [torch.rand(3), blob])
    raw = (tmp_path / "x").read_bytes()
    assert raw[extents[1].offset :][: extents[1].length] == b"some bytes"


def test_large_archives_use_zip64(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Everything past 1000 bytes counts as past 4 GiB: the same code without 4 GiB of memory.
    monkeypatch.setattr(archive, "_ZIP64_LIMIT", 1000)
    tensor = torch.rand(50, 50)
    [extent], _ = fastfile.write_file(tmp_path / "x", "x", [tensor])
    raw = (tmp_path / "x").read_bytes()
    assert b"PK\x06\x06" in raw
    assert b"PK\x06\x07" in raw
    assert same_bits(read(tmp_path / "x", extent), tensor)


def test_data_is_aligned_for_mapping(tmp_path: Path) -> None:
    tensors = [torch.full((n,), 7.5) for n in (1, 3, 100)]
    extents, _ = fastfile.write_file(tmp_path / "x", "x", list(tensors))
    raw = (tmp_path / "x").read_bytes()
    for tensor, extent in zip(tensors, extents, strict=True):
        assert raw.index(bytes(tensor.numpy().tobytes()), extent.offset) % 64 == 0


@pytest.mark.parametrize("piece_bytes", [250, 1000, 8 << 20])
def test_chunks_are_digested_across_items(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, piece_bytes: int
) -> None:
    monkeypatch.setattr(fastfile, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(fastfile, "_PIECE_BYTES", piece_bytes)
    _, record = fastfile.write_file(tmp_path / "x", "x", [torch.rand(n) for n in (10, 900, 300)])
    assert len(record.chunk_digests) == 8 * -(-record.size_bytes // 1000)
    assert fastfile.digest_file(tmp_path / "x").chunk_digests == record.chunk_digests


def test_a_short_write_is_continued(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = os.writev
    monkeypatch.setattr(fastfile.os, "writev", lambda fd, views: real(fd, [views[0][:777]]))
    tensor = torch.rand(5000)
    [extent], _ = fastfile.write_file(tmp_path / "x", "x", [tensor])
    monkeypatch.undo()
    assert same_bits(read(tmp_path / "x", extent), tensor)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failing_disk_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int) -> None:
    def fail(fd: int, views: Any) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fastfile.os, "writev", fail)
    with pytest.raises(OSError, match=os.strerror(code)):
        fastfile.write_file(tmp_path / "x", "x", [torch.rand(5)])


def test_meta_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="meta device"):
        fastfile.write_file(tmp_path / "x", "x", [torch.empty(3, device="meta")])


@pytest.fixture
def device() -> Iterator[None]:
    from vime_optim.simulate import device as simulated

    simulated.enable()
    try:
        yield
    finally:
        simulated.disable()


def test_device_tensors_go_through_a_small_window(
    device: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fastfile, "CHUNK_BYTES", 1000)
    windows: list[fastfile.HostWindow] = []

    def window() -> fastfile.HostWindow:
        windows.append(HostWindow(256))
        return windows[-1]

    monkeypatch.setattr(fastfile, "HostWindow", window)
    shapes = [(3,), (64,), (65,), (40, 50), (), (0, 4), (7, 11)]
    host = [filled(shape, torch.float32) for shape in shapes]
    on_device = [tensor.to("cuda") for tensor in host]
    assert all(tensor.device.type == "cuda" for tensor in on_device)
    mixed = [*on_device[:4], host[5], on_device[3].t(), on_device[6][2:5, 1:4], *on_device[4:]]
    expected = [*host[:4], host[5], host[3].t(), host[6][2:5, 1:4], *host[4:]]

    extents, record = fastfile.write_file(tmp_path / "x", "x", mixed)
    fastfile.write_file(tmp_path / "plain", "x", list(expected))

    for tensor, extent in zip(expected, extents, strict=True):
        assert same_bits(read(tmp_path / "x", extent), tensor)
    assert fastfile.digest_file(tmp_path / "x").chunk_digests == record.chunk_digests
    size = record.size_bytes - fastfile.TRAILER_BYTES
    assert (tmp_path / "x").read_bytes()[:size] == (tmp_path / "plain").read_bytes()[:size]
    assert len(windows) == 2


def test_a_window_waits_for_the_digest_of_its_piece(
    device: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A slow digest reads each piece before the window is filled again."""
    monkeypatch.setattr(fastfile, "HostWindow", lambda: HostWindow(64))
    real = fastfile.xxhash.xxh3_64

    class Slow:
        def __init__(self) -> None:
            self.state = real()

        def update(self, data: Any) -> None:
            time.sleep(0.01)
            self.state.update(data)

        def digest(self) -> bytes:
            return bytes(self.state.digest())

    monkeypatch.setattr(fastfile.xxhash, "xxh3_64", Slow)
    _, record = fastfile.write_file(tmp_path / "x", "x", [torch.rand(100).to("cuda")])
    monkeypatch.undo()
    assert fastfile.digest_file(tmp_path / "x").chunk_digests == record.chunk_digests


def test_small_tensors_share_a_window(
    device: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The digest is waited for when the window is full, not for each tensor."""
    monkeypatch.setattr(fastfile, "HostWindow", lambda: HostWindow(256))
    waits = []
    settle = fastfile.DigestingFile.settle
    monkeypatch.setattr(
        fastfile.DigestingFile, "settle", lambda file: (waits.append(1), settle(file))[1]
    )
    host = [torch.rand(3) for _ in range(100)] + [torch.rand(50)]
    extents, record = fastfile.write_file(tmp_path / "x", "x", [t.to("cuda") for t in host])

    assert len(waits) == -(-sum(tensor.nbytes for tensor in host) // 256)  # with the file's end
    assert fastfile.digest_file(tmp_path / "x").chunk_digests == record.chunk_digests
    for tensor, extent in zip(host, extents, strict=True):
        assert same_bits(read(tmp_path / "x", extent), tensor)


def test_a_request_that_is_executed_again_writes_everything_again(tmp_path: Path) -> None:
    index = SimpleNamespace(index=MetadataIndex("weight"))
    path = tmp_path / "x.distcp"
    buckets = [(str(path), path.name, ([], [(index, torch.rand(5))]))]
    for _ in range(2):
        outcome: queue.Queue[Any] = queue.Queue()
        task.run(0, buckets, outcome)
        assert [len(results) for results in outcome.get().values()] == [1]
        path.unlink()


def test_an_async_save_has_the_bytes_of_a_sync_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether its units are written from where they lie, or from copies, or both."""
    monkeypatch.setattr(units, "UNIT_BYTES", 4096)
    data: list[Any] = [
        io.BytesIO(b"common" * 500),
        torch.rand(3000),
        torch.rand(40, 30).t(),
        torch.tensor(2.5),
        torch.rand(0, 4),
        torch.rand(100, dtype=torch.float64)[7:91],
        torch.rand(5, dtype=torch.complex64).conj(),
        torch.rand(9).to(torch.bfloat16),
    ]
    pairs = [(SimpleNamespace(index=MetadataIndex(f"k{n}")), d) for n, d in enumerate(data)]
    extents, _ = fastfile.write_file(tmp_path / "sync", "sync", data)
    wanted = (tmp_path / "sync").read_bytes()[: -fastfile.TRAILER_BYTES]
    plan = units.plan_file((tmp_path / "x", "x", (pairs[:1], pairs[1:])), UpdateOrder())
    assert plan.extents == extents
    assert len(plan.units) > 4
    with fastfile.DigestingFile(tmp_path / "async", beside=False) as file:
        for number, unit in enumerate(plan.units):
            assert 0 < unit.nbytes <= 4096
            room = torch.empty(4096, dtype=torch.uint8)
            copied = number % 2 or not unit.direct
            file.write_vector([unit.fill(room)] if copied else unit.views())
        record = file.finish("async")
    assert (tmp_path / "async").read_bytes()[: -fastfile.TRAILER_BYTES] == wanted
    assert fastfile.digest_file(tmp_path / "async").chunk_digests == record.chunk_digests

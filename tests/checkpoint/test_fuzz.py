"""Each reader on damaged and random bytes: CheckpointError or a sound answer, nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import struct
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.checkpoint.broken import saved, write_checkpoint
from vime_optim.checkpoint.dcp_metadata import parse_metadata
from vime_optim.checkpoint.diff import diff_checkpoints
from vime_optim.checkpoint.inspect import inspect_checkpoint
from vime_optim.checkpoint.items import FileWindow, read_layout
from vime_optim.checkpoint.safe_load import load_common
from vime_optim.checkpoint.safetensors_io import read_header
from vime_optim.errors import CheckpointError

SLOW = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def mutations(data: bytes) -> st.SearchStrategy[bytes]:
    """Cuts, single bytes and stretches changed."""
    spot = st.integers(0, len(data) - 1)
    cut = spot.map(lambda i: data[:i])
    byte = st.tuples(spot, st.integers(0, 255)).map(
        lambda p: data[: p[0]] + bytes([p[1]]) + data[p[0] + 1 :]
    )
    stretch = st.tuples(spot, st.binary(min_size=1, max_size=12)).map(
        lambda p: data[: p[0]] + p[1] + data[p[0] + len(p[1]) :]
    )
    inserted = st.tuples(spot, st.binary(min_size=1, max_size=12)).map(
        lambda p: data[: p[0]] + p[1] + data[p[0] :]
    )
    return st.one_of(cut, byte, stretch, inserted)


def plain_metadata() -> bytes:
    size = torch.Size([4, 2])
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), size)
    tensor = TensorStorageMetadata(TensorProperties(torch.bfloat16), size, [chunk])
    places = {
        MetadataIndex("weight", [0, 0], 0): _StorageInfo("__0_0.distcp", 0, 1234),
        MetadataIndex("object"): _StorageInfo("__0_0.distcp", 1234, 10),
    }
    content = {"weight": tensor, "object": BytesStorageMetadata()}
    return pickle.dumps(Metadata(content, {}, places))


COMMON = saved({"iteration": 3, "optimizer": {"param_groups": [{"lr": 0.5, "step": 3}]}})
ITEM = saved(torch.arange(12.0).reshape(3, 4))


@given(data=st.one_of(mutations(plain_metadata()), st.binary(max_size=200)))
@SLOW
def test_fuzz_metadata(data: bytes) -> None:
    try:
        index = parse_metadata(data)
    except CheckpointError:
        return
    for entry in index.tensors.values():
        assert all(len(chunk.offsets) == len(entry.shape) for chunk in entry.chunks)


@given(data=st.one_of(mutations(COMMON), st.binary(max_size=200)))
@SLOW
def test_fuzz_common_state(data: bytes) -> None:
    with contextlib.suppress(CheckpointError):
        load_common(data)


@given(data=st.one_of(mutations(ITEM), st.binary(max_size=200)))
@SLOW
def test_fuzz_items(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "item"
    path.write_bytes(data)
    descriptor = os.open(path, os.O_RDONLY)
    with contextlib.suppress(CheckpointError):
        layout = read_layout(FileWindow(descriptor, 0, len(data)), 0, len(data), "here")
        end = layout.start_bytes + layout.extent_elem * layout.dtype.itemsize
        assert 0 <= layout.start_bytes <= end <= len(data)
    os.close(descriptor)


@given(data=st.one_of(st.binary(max_size=200), st.text(max_size=100).map(str.encode)))
@SLOW
def test_fuzz_safetensors(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    for content in (data, struct.pack("<Q", len(data)) + data):
        path.write_bytes(content)
        with contextlib.suppress(CheckpointError):
            for tensor in read_header(path).values():
                assert tensor.start_bytes + tensor.size_bytes <= len(content)


@given(data=st.data())
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_fuzz_a_whole_directory(data: st.DataObject, tmp_path: Path) -> None:
    """One file of a small checkpoint changed anywhere: equal to itself, or refused in words."""
    folder = write_checkpoint(tmp_path / "c")
    name = data.draw(st.sampled_from([".metadata", "common.pt", "__0_0.distcp", "metadata.json"]))
    path = folder / name
    path.write_bytes(data.draw(mutations(path.read_bytes())))
    with contextlib.suppress(CheckpointError):
        report = inspect_checkpoint(folder, tree=True)
        assert json.dumps(report.to_dict(), default=str)
        assert diff_checkpoints(folder, folder, memory_bytes=1 << 16).verdict == 0

"""Each reader on damaged and random bytes: CheckpointError or a sound answer, nothing else."""

from __future__ import annotations

import json
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import torch
from hypothesis import HealthCheck, example, given, settings
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

from tests.tools.broken import saved, write_checkpoint
from vime_optim.errors import CheckpointError
from vime_optim.files.dcp_metadata import parse_metadata
from vime_optim.files.items import FileWindow, read_layout
from vime_optim.files.safe_load import load_common
from vime_optim.tools.diff import diff_checkpoints
from vime_optim.tools.inspect import inspect_checkpoint
from vime_optim.tools.safetensors_io import read_header

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


COMMON_VALUE = {"iteration": 3, "optimizer": {"param_groups": [{"lr": 0.5, "step": 3}]}}
COMMON = saved(COMMON_VALUE)
ITEM = saved(torch.arange(12.0).reshape(3, 4))


METADATA = plain_metadata()


@given(data=st.one_of(mutations(METADATA), st.binary(max_size=200)))
@example(data=METADATA)
@SLOW
def test_fuzz_metadata(data: bytes) -> None:
    """Refused, or chunks that lie within their tensors."""
    try:
        index = parse_metadata(data)
    except CheckpointError:
        if data == METADATA:
            raise
        return
    if data == METADATA:
        assert index.tensors["weight"].shape == (4, 2)
    for entry in index.tensors.values():
        for chunk in entry.chunks:
            for first, length, whole in zip(chunk.offset, chunk.size, entry.shape, strict=True):
                assert 0 <= first <= first + length <= whole


@given(data=st.one_of(mutations(COMMON), st.binary(max_size=200)))
@example(data=COMMON)
@SLOW
def test_fuzz_common_state(data: bytes) -> None:
    """Refused, or the very values: the archive's checksums cover all that decides about them."""
    try:
        loaded = load_common(data)
    except CheckpointError:
        if data == COMMON:
            raise
        return
    assert loaded == COMMON_VALUE
    assert type(loaded["iteration"]) is int


@given(data=st.one_of(mutations(ITEM), st.binary(max_size=200)))
@example(data=ITEM)
@SLOW
def test_fuzz_items(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "item"
    path.write_bytes(data)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        layout = read_layout(FileWindow(descriptor, 0, len(data)), 0, len(data), "here")
    except CheckpointError:
        if data == ITEM:
            raise
        return
    finally:
        os.close(descriptor)
    end = layout.start_bytes + layout.extent_elem * layout.dtype.itemsize
    assert 0 <= layout.start_bytes <= end <= len(data)
    if data == ITEM:
        assert layout.shape == (3, 4)
        held = np.frombuffer(data[layout.start_bytes : end], np.float32)
        assert held.tolist() == list(range(12))


@given(data=st.one_of(st.binary(max_size=200), st.text(max_size=100).map(str.encode)))
@SLOW
def test_fuzz_safetensors(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    for content in (data, struct.pack("<Q", len(data)) + data):
        path.write_bytes(content)
        try:
            tensors = read_header(path)
        except CheckpointError:
            continue
        for tensor in tensors.values():
            assert 8 <= tensor.start_bytes <= tensor.start_bytes + tensor.size_bytes <= len(content)


def test_a_safetensors_header_that_is_right_is_read(tmp_path: Path) -> None:
    """What the fuzz above starts from is not refused for another reason."""
    path = tmp_path / "f.safetensors"
    header = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 8)
    (tensor,) = read_header(path).values()
    assert (tensor.start_bytes, tensor.size_bytes) == (8 + len(header), 8)


@given(data=st.data())
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_fuzz_a_whole_directory(data: st.DataObject, tmp_path: Path) -> None:
    """One file of a small checkpoint changed anywhere: equal to itself, or refused in words."""
    folder = write_checkpoint(tmp_path / "c")
    name = data.draw(st.sampled_from([".metadata", "common.pt", "__0_0.distcp", "metadata.json"]))
    path = folder / name
    assert diff_checkpoints(folder, folder, memory_bytes=1 << 16).verdict == 0
    path.write_bytes(data.draw(mutations(path.read_bytes())))
    try:
        report = inspect_checkpoint(folder, tree=True)
        verdict = diff_checkpoints(folder, folder, memory_bytes=1 << 16).verdict
    except CheckpointError:
        return
    assert json.dumps(report.to_dict(), default=str)
    assert verdict == 0

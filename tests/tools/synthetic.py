"""A checkpoint of any size, written piece by piece in the layout of torch DCP."""

from __future__ import annotations

import io
import itertools
import json
import pickle
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)


def write_synthetic(
    folder: Path, *, tensors: int, shape: tuple[int, int], chunks: tuple[int, int], seed: int = 1
) -> None:
    """float32 tensors `weight_N`, cut into a grid of chunks, one file for each row of the grid.

    The values depend on tensor and seed alone, not on the grid.
    """
    folder.mkdir(parents=True)
    entries, places = {}, {}
    files = [(folder / f"__{row}_0.distcp").open("wb") for row in range(chunks[0])]
    for number in range(tensors):
        generator = torch.Generator().manual_seed(seed * 1000 + number)
        whole = torch.randn(shape, generator=generator)
        boxes = []
        borders = [
            [size * i // count for i in range(count + 1)]
            for size, count in zip(shape, chunks, strict=True)
        ]
        for row, column in itertools.product(*map(range, chunks)):
            low = [borders[0][row], borders[1][column]]
            high = [borders[0][row + 1], borders[1][column + 1]]
            piece = whole[low[0] : high[0], low[1] : high[1]].clone()
            buffer = io.BytesIO()
            torch.save(piece, buffer)
            start = files[row].tell()
            files[row].write(buffer.getbuffer())
            boxes.append(ChunkStorageMetadata(torch.Size(low), piece.size()))
            place = _StorageInfo(f"__{row}_0.distcp", start, files[row].tell() - start)
            places[MetadataIndex(f"weight_{number}", low, len(boxes) - 1)] = place
        properties = TensorProperties(torch.float32)
        entries[f"weight_{number}"] = TensorStorageMetadata(properties, torch.Size(shape), boxes)
    for file in files:
        file.close()
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(entries, {}, places)))
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    torch.save({"iteration": 1}, folder / "common.pt")


def write_dcp(folder: Path, tensors: dict[str, torch.Tensor], common: object = None) -> Path:
    """A checkpoint of whole tensors in one file, and a common state."""
    folder.mkdir(parents=True)
    entries, places = {}, {}
    with (folder / "__0_0.distcp").open("wb") as file:
        for key, tensor in tensors.items():
            start = file.tell()
            buffer = io.BytesIO()
            torch.save(tensor.clone(memory_format=torch.preserve_format), buffer)
            file.write(buffer.getbuffer())
            zeros = torch.Size([0] * tensor.dim())
            entries[key] = TensorStorageMetadata(
                TensorProperties(tensor.dtype),
                tensor.size(),
                [ChunkStorageMetadata(zeros, tensor.size())],
            )
            place = _StorageInfo("__0_0.distcp", start, file.tell() - start)
            places[MetadataIndex(key, zeros, 0)] = place
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(entries, {}, places)))
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    torch.save({"iteration": 1} if common is None else common, folder / "common.pt")
    return folder

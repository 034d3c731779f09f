"""Small checkpoints with whatever is asked to be wrong."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def write_checkpoint(
    folder: Path,
    *,
    file: str = "__0_0.distcp",
    offset: int = 0,
    length: int | None = None,
    shape: tuple[int, ...] = (4,),
    content: bytes | None = None,
) -> Path:
    """A checkpoint of one tensor, with whatever is asked to be wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    data = saved(torch.arange(4.0)) if content is None else content
    (folder / "__0_0.distcp").write_bytes(data)
    size = torch.Size(shape)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), size)
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), size, [chunk])
    place = _StorageInfo(file, offset, len(data) if length is None else length)
    index = MetadataIndex("weight", [0] * len(shape))
    metadata = Metadata({"weight": tensor}, {}, {index: place})
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (folder / "common.pt").write_bytes(saved({"iteration": 1}))
    return folder

"""Reads a checkpoint back chunk by chunk, by torch's own metadata, and compares bits."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader

from vime_optim.tools.bits import same_bits

Chunk = tuple[str, tuple[int, ...]]
"""Key and offsets in the whole tensor."""


def snapshot(state: Any) -> dict[Chunk, torch.Tensor]:
    """Copies of every tensor of a sharded state dict that this rank is to write."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica

    found = {}
    for item in nested_values(state):
        if isinstance(item, ShardedTensor) and is_main_replica(item.replica_id):
            data = item.data
            if item.prepend_axis_num:
                data = data.view((1,) * item.prepend_axis_num + tuple(data.shape))
            found[item.key, tuple(int(o) for o in item.global_offset)] = data.detach().cpu().clone()
    return found


def stored(directory: Path) -> dict[Chunk, tuple[str, int, int]]:
    """Where each chunk lies: file, offset, length."""
    metadata = FileSystemReader(str(directory)).read_metadata()
    found = {}
    for index, info in metadata.storage_data.items():
        if index.offset is not None:
            chunk = (index.fqn, tuple(int(o) for o in index.offset))
            found[chunk] = (info.relative_path, info.offset, info.length)
    return found


def read_chunk(directory: Path, place: tuple[str, int, int]) -> torch.Tensor:
    name, offset, length = place
    with open(directory / name, "rb") as file:
        file.seek(offset)
        blob = io.BytesIO(file.read(length))
    loaded: torch.Tensor = torch.load(blob, map_location="cpu", weights_only=True)
    return loaded


def differences(directory: Path, expected: dict[Chunk, torch.Tensor]) -> list[str]:
    """Names of the chunks that are missing or hold other bits."""
    there = stored(directory)
    wrong = []
    for chunk, value in expected.items():
        name = f"{chunk[0]}{list(chunk[1])}"
        if chunk not in there:
            wrong.append(f"{name} missing")
            continue
        loaded = read_chunk(directory, there[chunk])
        if not same_bits(loaded.reshape(value.shape), value):
            wrong.append(name)
    return wrong

"""A rank's shards of a key with prepended axes, without descriptions of all other ranks' shards.

megatron-core describes the whole grid of such a key to torch on every rank, for each save and each
load: 15,616 shards a key for 61 layers of 256 experts. Its own containers of local shards, which it
uses for keys without prepended axes, need only what the rank holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies.checkpointable import (
    CheckpointableShardedTensor,
    LocalShardsContainer,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

_FEW = 64
"""Fragments of a grid up to which megatron-core's own way is as fast."""


class PrependedShard(CheckpointableShardedTensor):  # type: ignore[misc]
    """A shard that DCP sees with axes of length one before its own."""

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self._sh_ten.global_offset), self._viewed().shape)

    def _viewed(self) -> torch.Tensor:
        held = self._sh_ten
        viewed: torch.Tensor = held.data.view((1,) * held.prepend_axis_num + held.local_shape)
        return viewed

    def __create_write_items__(self, fqn: str, _: Any, index: int | None = None) -> list[WriteItem]:
        chunk, properties = self.chunk, TensorProperties.create_from_tensor(self._sh_ten.data)
        data = TensorWriteData(chunk, properties, torch.Size(self._sh_ten.global_shape))
        place = MetadataIndex(fqn, chunk.offsets, index)
        return [WriteItem(place, WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self.chunk]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self._viewed()


def container_of(shards: Sequence[Any]) -> Any:
    """What stands for the shards of a key in a save or a load; None where megatron-core makes it.

    Args:
        shards: this rank's ShardedTensors of the key, with data.
    """
    first = shards[0]
    grid = first.axis_fragmentations
    if grid is None or math.prod(grid) <= _FEW or not first.prepend_axis_num:
        return None
    if any(shard.flattened_range is not None for shard in shards):
        return None
    for shard in shards:
        if not shard.data.is_contiguous():
            shard.data = shard.data.contiguous()
    return LocalShardsContainer([PrependedShard.from_sh_ten(shard) for shard in shards])

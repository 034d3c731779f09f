"""What each rank of a large job would hand to planning, made from the model's shape alone.

The plans are those of vime_optim's own cuts: the model's weights spread over data-parallel
replicas (in turns; Megatron's fully-parallel save balances by size), and the three optimizer states
cut where the distributed optimizer cuts its buffers. Every state is float32, weights are bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from vime_optim.reshard.plan import ParamRun, is_main, pieces_of_range
from vime_optim.tools.estimate.buffers import ParallelLayout
from vime_optim.tools.estimate.ranks import STATES, JobPlanner, state_key
from vime_optim.tools.estimate.shapes import PRESETS, ModelShape, ModelSplit

EXTRA_STATE = "decoder.layers.self_attention.core_attention._extra_state"

# Attention is approximated by eight groups of keys and values; the experts are what counts.
LARGEST = ModelShape("671B (61 layers, 256 experts)", 61, 7168, 128, 8, 128, 2048, 129280, 256)

JOBS: dict[str, tuple[ModelShape, ParallelLayout]] = {
    "30b-64": (PRESETS["Qwen3-30B-A3B"], ParallelLayout(64, ModelSplit(4, 1, 8, 1, None))),
    "235b-1024": (PRESETS["Qwen3-235B-A22B"], ParallelLayout(1024, ModelSplit(4, 8, 16, 1, 10))),
    "671b-4096": (LARGEST, ParallelLayout(4096, ModelSplit(2, 16, 32, 1, 1))),
}


@dataclass(frozen=True, slots=True)
class Shard:
    """One chunk that a rank holds; `prepended` axes of length one are not in its own tensor."""

    key: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    dtype: torch.dtype
    is_main: bool
    prepended: int = 0
    is_grid: bool = False

    def to_megatron(self, with_data: bool) -> Any:
        """As megatron-core's ShardedTensor, on the meta device."""
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        local = self.size[self.prepended :]
        grid = tuple(n // s for n, s in zip(self.whole, self.size, strict=True))
        return ShardedTensor(
            key=self.key,
            data=torch.empty(local, dtype=self.dtype, device="meta") if with_data else None,
            dtype=self.dtype,
            local_shape=local,
            global_shape=self.whole,
            global_offset=self.offset,
            axis_fragmentations=grid if self.is_grid else None,
            replica_id=(0, 0, int(not self.is_main)),
            prepend_axis_num=self.prepended,
        )


def job(name: str, keys: str) -> tuple[JobPlanner, ParallelLayout]:
    """A job by name; `keys` is "stacked" (layers are an axis) or "singleton" (layers are keys)."""
    shape, layout = JOBS[name]
    return JobPlanner(replace(shape, homogeneous_layers=keys == "stacked"), layout), layout


def shards_of(planner: JobPlanner, layout: ParallelLayout, rank: int) -> Iterator[Shard]:
    """All chunks of a rank, replicas of others included, as a save hands them to Megatron."""
    for buffer, group_rank in planner.rank_buffers(layout.coordinates(rank)):
        number = 0
        for param in buffer.params:
            for target in param.targets:
                number += 1
                mine = is_main(target.replica_id) and number % buffer.group_size == group_rank
                yield _weight(target, mine)
        for param, start, end in buffer.owned(group_rank):
            for target in param.targets:
                for state in STATES:
                    key = state_key(state, target.key)
                    for piece in pieces_of_range(
                        target,
                        start,
                        end,
                        param=param.name,
                        state=state,
                        shard_start=0,
                        key=key,
                    ):
                        yield Shard(
                            key,
                            piece.global_shape,
                            piece.offset,
                            piece.size,
                            torch.float32,
                            piece.is_main_replica,
                        )


def _weight(target: ParamRun, mine: bool) -> Shard:
    prepended = len(target.global_shape) - len(target.local_shape)
    return Shard(
        target.key,
        target.global_shape,
        target.global_offset,
        (1,) * prepended + target.local_shape,
        torch.bfloat16,
        mine,
        prepended,
        True,
    )


def objects_of(layout: ParallelLayout, rank: int, layers: int) -> list[tuple[str, int, int]]:
    """(key, shards, number) of objects: the state of random numbers, and a layer's extra state."""
    at = layout.coordinates(rank)
    objects = [("rng_state", layout.world_size, rank)]
    if at.dp == 0 and at.tp == 0:
        stages = layout.split.pp
        each = -(-layers // stages)
        own = range(at.pp * each, min(layers, (at.pp + 1) * each))
        objects += [(EXTRA_STATE, layers, n) for n in own]
    return objects


def plan_of(shards: Iterator[Shard], objects: list[tuple[str, int, int]]) -> Any:
    """The SavePlan that Megatron's planner makes of a rank's main replicas.

    Made directly, since building thousands of ranks' tensors takes minutes; `scale` compares it
    with the real planner's for the rank that it looks at.
    """
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import (
        SavePlan,
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )

    by_key: dict[str, list[Shard]] = {}
    for shard in shards:
        if shard.is_main:
            by_key.setdefault(shard.key, []).append(shard)
    items = []
    for key, held in by_key.items():
        for number, shard in enumerate(held):
            offset = torch.Size(shard.offset)
            chunk = ChunkStorageMetadata(offset, torch.Size(shard.size))
            properties = TensorProperties(dtype=shard.dtype)
            data = TensorWriteData(chunk, properties, torch.Size(shard.whole))
            hint = number if not shard.prepended and len(held) > 1 else None
            place = MetadataIndex(key, offset, hint)
            items.append(WriteItem(place, WriteItemType.SHARD, tensor_data=data))
    for key, shards_in_all, number in objects:
        name = f"{key}/shard_{number}_{shards_in_all}"
        items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
    return SavePlan(items)


def results_of(plan: Any, rank: int) -> list[Any]:
    """What the rank's writer reports: two files, and an item's place in them."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    from vime_optim.commit.task import RecordedResult
    from vime_optim.files.fastfile import CHUNK_BYTES, FileRecord

    results, position = [], [0, 0]
    for number, item in enumerate(plan.items):
        file = number % 2
        data = item.tensor_data
        length = 4096
        if data is not None:
            numel = 1
            for n in data.chunk.sizes:
                numel *= n
            length = numel * data.properties.dtype.itemsize + 1200
        name = f"__{rank}_{file}.distcp"
        info = _StorageInfo(name, position[file], length)
        position[file] += length
        record = None
        if number >= len(plan.items) - 2:
            digests = bytes(8 * -(-position[file] // CHUNK_BYTES))
            record = FileRecord(name, position[file], f"{rank:08x}{file:08x}", digests)
        results.append(RecordedResult(item.index, length, info, record))
    results.sort(key=lambda result: str(result.storage_data.relative_path))
    return results

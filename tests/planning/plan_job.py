"""Ranks that save a stacked key in uneven pieces, again and again; ranks of stock that load it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vime_optim.tools.bits import same_bits

SHAPE = (6, 4, 8, 16)  # layers, experts, rows, columns
MODEL = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
STATE = f"optimizer.state.exp_avg.{MODEL}"


def whole(save: int) -> torch.Tensor:
    return torch.arange(torch.Size(SHAPE).numel(), dtype=torch.float32).view(SHAPE) + save


def pieces(rank: int, world: int, shift: int) -> Any:
    """This rank's boxes: of each expert's rows, the first to one rank, and the rest by turns."""
    for layer in range(SHAPE[0]):
        for expert in range(SHAPE[1]):
            cut = 3 + shift * (layer == 2)
            for number, (start, rows) in enumerate(((0, cut), (cut, SHAPE[2] - cut))):
                if (layer + expert + number) % world == rank:
                    yield (layer, expert, start, 0), (1, 1, rows, SHAPE[3])


def state(save: int, shift: int, overlap: bool = False) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    values = whole(save)
    made: dict[str, Any] = {}
    for number, (offset, size) in enumerate(pieces(rank, world, shift)):
        if overlap and rank == 1 and number == 5:
            offset, size = (*offset[:2], 1, 0), (1, 1, SHAPE[2] - 1, SHAPE[3])
        box = tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))
        made[f"s{number}"] = ShardedTensor(
            key=STATE,
            data=values[box].clone(),
            dtype=torch.float32,
            local_shape=size,
            global_shape=SHAPE,
            global_offset=offset,
            axis_fragmentations=None,
        )
    for layer in range(rank, SHAPE[0], world):
        for expert in range(SHAPE[1]):
            made[f"w{layer}.{expert}"] = ShardedTensor.from_rank_offsets(
                MODEL,
                values[layer, expert].clone(),
                (0, layer, SHAPE[0]),
                (1, expert, SHAPE[1]),
                prepend_axis_num=2,
            )
    made["rng"] = ShardedObject("rng_state", [rank, save], (world,), (rank,))
    return {"model": made, "iteration": save}


def _save(
    directory: Path, save: int, shift: int, overlap: bool = False, strategy: Any = None
) -> str:
    from megatron.core import dist_checkpointing

    if torch.distributed.get_rank() == 0:
        directory.mkdir(parents=True)
    torch.distributed.barrier()
    try:
        dist_checkpointing.save(state(save, shift, overlap), str(directory), strategy)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def cached(payload: dict[str, Any]) -> dict[str, Any]:
    """Saves with Megatron's own cache of plans (--dist-ckpt-save-assume-constant-structure): four
    of one job, two of a job that has the metadata of the fourth from its load, and one without
    that cache, whose plan is that of the first."""
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
    from torch.distributed.checkpoint import FileSystemReader

    import vime_optim
    from vime_optim.planning import exchange

    differ = _prepended()  # while Megatron's own is in place
    vime_optim.install()
    gathered = []
    gather = exchange.gather_plans

    def noted(*args: Any) -> Any:
        gathered.append(args)
        return gather(*args)

    exchange.gather_plans = noted
    root = Path(payload["directory"])
    errors, after = [], []
    for number in range(7):
        if number in (0, 4):
            strategy: Any = TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True)
        if number == 4:
            strategy.cached_global_metadata = FileSystemReader(root / "3").read_metadata()
        if number == 6:
            strategy = None
        errors.append(_save(root / str(number), number, 0, strategy=strategy))
        after.append(len(gathered))
    return {"after": after, "errors": errors, "differ": differ}


def saves(payload: dict[str, Any]) -> dict[str, Any]:
    """Saves: first, the same plan twice, one rank's plan changed, an overlap, and sound again."""
    import vime_optim
    from vime_optim.planning import exchange, local_shards

    vime_optim.install()
    local_shards._FEW = 0  # so that this grid is described by us, too
    sent: list[str] = []
    outgoing = exchange._outgoing

    def noted(*args: Any) -> Any:
        made = outgoing(*args)
        sent.append(type(made).__name__)
        return made

    exchange._outgoing = noted
    root = Path(payload["directory"])
    errors = [
        _save(root / str(number), number, shift, overlap)
        for number, (shift, overlap) in enumerate(
            [(0, False), (0, False), (0, False), (1, False), (1, True), (1, False), (1, False)]
        )
    ]
    written = sorted(p.name for p in (root / "4").iterdir()) if (root / "4").exists() else []
    return {"sent": sent, "errors": errors, "written": written}


def loads(payload: dict[str, Any]) -> dict[str, Any]:
    """Loads, without us: each rank the other's halves; equality of every bit."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    equal = {}
    for number in payload["saves"]:
        rank = torch.distributed.get_rank()
        half = slice(0, 5) if rank else slice(5, 8)
        rows = half.stop - half.start
        wanted = {
            key: ShardedTensor(
                key=key,
                data=torch.zeros(SHAPE[0], SHAPE[1], rows, SHAPE[3]),
                dtype=torch.float32,
                local_shape=(SHAPE[0], SHAPE[1], rows, SHAPE[3]),
                global_shape=SHAPE,
                global_offset=(0, 0, half.start, 0),
                axis_fragmentations=None,
            )
            for key in (MODEL, STATE)
        }
        read = dist_checkpointing.load(wanted, str(Path(payload["directory"]) / str(number)))
        expected = whole(number)[:, :, half]
        equal[str(number)] = all(same_bits(read[key], expected) for key in (MODEL, STATE))
        equal[str(number)] &= read["iteration"] == number
    return {"equal": equal}


def integrity(payload: dict[str, Any]) -> dict[str, Any]:
    """Megatron's check of random shards, and ours: how often they agreed, passed and refused."""
    import random

    from megatron.core.dist_checkpointing import validation

    from vime_optim.planning import shards

    check = validation.validate_sharding_integrity
    answers: dict[str, Any] = {"passed": 0, "refused": 0, "proved": 0, "differ": []}
    for seed in range(payload["cases"]):
        ranks = _random_shards(random.Random(seed))
        packed = shards.GlobalShards([shards.pack(rank) for rank in ranks])
        for rank, sent in zip(ranks, packed, strict=True):
            assert sorted(map(repr, rank)) == sorted(map(repr, sent))
        theirs = _outcome(check, ranks)
        ours = _outcome(shards.validate, check, packed)
        if theirs != ours:
            answers["differ"].append((seed, theirs, ours))
        answers["refused" if theirs else "passed"] += 1
        answers["proved"] += all(len(left) == len(p.rest) for left, p in _left(packed))
    return answers


def _prepended() -> list[str]:
    """Keys with prepended axes, as Megatron describes them to torch and as we do: what differs."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.strategies import torch as strategy
    from torch.distributed.checkpoint import planner_helpers
    from torch.distributed.checkpoint.utils import find_tensor_shard

    from vime_optim.planning import local_shards

    def shard(expert: int) -> Any:
        data = torch.arange(12.0).view(4, 3).t() + expert  # not contiguous: Megatron copies it
        place = (1, expert, 100), (2, 1, 2)
        return ShardedTensor.from_rank_offsets("w", data, (0, 2, 3), *place, prepend_axis_num=2)

    differ = []
    for experts in ([7], [98, 0, 55]):
        theirs = strategy.sharded_tensor_to_torch_sharded_tensor([shard(e) for e in experts])
        ours = local_shards.container_of([shard(e) for e in experts])
        items = planner_helpers._create_write_items("w", ours)
        chunks = planner_helpers._create_chunk_list
        if items != planner_helpers._create_write_items("w", theirs):
            differ.append("items")
        if chunks(ours) != chunks(theirs) or ours.size() != theirs.size():
            differ.append("chunks")
        for item in items:
            one, other = (find_tensor_shard(t, item.index) for t in (ours, theirs))
            if one.shape != other.shape or not torch.equal(one, other):
                differ.append("data")
            one.fill_(1.0)  # as a load does
            other.fill_(1.0)
        one, other = (strategy._unwrap_pyt_sharded_tensor(t) for t in (ours, theirs))
        if not all(
            a.shape == b.shape and torch.equal(a, b) for a, b in zip(one, other, strict=True)
        ):
            differ.append("loaded")
    if local_shards.container_of([replace(shard(0), axis_fragmentations=(1, 1, 1, 2))]):
        differ.append("a small grid")
    return differ


def _left(packed: Any) -> Any:
    return zip(packed.unproved(), packed.ranks, strict=True)


def _outcome(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except Exception as error:
        return type(error).__name__
    return ""


def _random_shards(random: Any) -> list[list[Any]]:
    """Ranks' shards of two keys: whole grids most of the time, sometimes with one thing wrong."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    ranks: list[list[Any]] = [[] for _ in range(random.randint(1, 3))]
    for key in "ab":
        for shard in _random_key(random, key):
            random.choice(ranks).append(shard)
    for number, rank in enumerate(ranks):
        rank.append(ShardedObject("rng", None, (len(ranks),), (number,)))
        if random.random() < 0.1:
            rank.append(ShardedObject("rng", None, (len(ranks),), (0,)))
    return ranks


def _random_key(random: Any, key: str) -> list[Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    grid = tuple(random.randint(1, 3) for _ in range(random.randint(1, 3)))
    prepended = random.randint(0, len(grid) - 1)
    local = (1,) * prepended + tuple(random.randint(1, 3) for _ in grid[prepended:])
    whole = tuple(n * s for n, s in zip(grid, local, strict=True))
    regular = random.random() < 0.8
    held = []
    for place in itertools.product(*map(range, grid)):
        shard = ShardedTensor(
            key,
            None,
            torch.float32,
            local[prepended:],
            whole,
            tuple(p * s for p, s in zip(place, local, strict=True)),
            grid if regular else None,
            (0, 0, 0),
            prepended,
        )
        held.append(shard)
        held += [replace(shard, replica_id=(0, 0, 1))] * random.randint(0, 1)
    wrong = random.choice(["", "", "", "drop", "twice", "dtype", "grid", "replica", "whole"])
    number = random.randrange(len(held))
    if wrong == "drop":
        del held[number]
    elif wrong == "twice":
        held.append(held[number])
    elif wrong == "dtype":
        held[number] = replace(held[number], dtype=torch.float16)
    elif wrong == "grid":
        held[number] = replace(held[number], axis_fragmentations=None if regular else grid)
    elif wrong == "replica":
        held[number] = replace(held[number], replica_id=random.randint(0, 1))
    elif wrong == "whole":
        held[number] = replace(held[number], global_shape=(whole[0] + local[0], *whole[1:]))
    return held

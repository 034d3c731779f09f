"""Ranks that save a stacked key in uneven pieces, again and again; ranks of stock that load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

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


def _save(directory: Path, save: int, shift: int, overlap: bool = False) -> str:
    from megatron.core import dist_checkpointing

    if torch.distributed.get_rank() == 0:
        directory.mkdir(parents=True)
    torch.distributed.barrier()
    try:
        dist_checkpointing.save(state(save, shift, overlap), str(directory))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def saves(payload: dict[str, Any]) -> dict[str, Any]:
    """Saves: first, the same plan twice, one rank's plan changed, an overlap, and sound again."""
    import vime_optim
    from vime_optim.planning import exchange

    vime_optim.install()
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
        equal[str(number)] = all(torch.equal(read[key], expected) for key in (MODEL, STATE))
        equal[str(number)] &= read["iteration"] == number
    return {"equal": equal}

"""Phases of a verify job that also tell how a checkpoint was read."""

from __future__ import annotations

import pickle
import weakref
from pathlib import Path
from typing import Any

import torch

from vime_optim.errors import CheckpointError
from vime_optim.verify import job


def resume(payload: dict[str, Any]) -> dict[str, Any]:
    """Resume; also what status() counted and the memory that coded shards had, in bytes."""
    import vime_optim
    from vime_optim.reshard import coded

    live: dict[int, int] = {}
    seen = {"most": 0, "largest": 0, "all": 0}

    class Recorded(coded._Memory):
        def get(self, numel: int, device: torch.device) -> torch.Tensor:
            flat = super().get(numel, device)
            seen["all"] += 4 * numel
            seen["largest"] = max(seen["largest"], 4 * numel)
            storage = flat.untyped_storage()
            if id(storage) not in live:
                live[id(storage)] = storage.nbytes()
                weakref.finalize(storage, live.pop, id(storage), None)
            seen["most"] = max(seen["most"], sum(live.values()))
            return flat

    coded._Memory = Recorded
    answer = job.resume(payload)
    return {**answer, "counters": dict(vime_optim.status().counters), "coded": seen}


def resume_by_torch(payload: dict[str, Any]) -> dict[str, Any]:
    """Resume through a reader that is not ours."""
    from vime_optim.reshard import storage

    storage.is_understood = lambda reader: False
    return resume(payload)


def resume_exchanging(payload: dict[str, Any]) -> dict[str, Any]:
    """Resume with ranks that read for each other; tells how many shards were given memory."""
    import vime_optim

    vime_optim.install()
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import fully_parallel

    from vime_optim.reshard import coded

    load_plain = dist_checkpointing.load
    given: list[int] = []
    real = coded.CodedShard.real

    def load(state: Any, directory: str, **options: Any) -> Any:
        strategy = fully_parallel.FullyParallelLoadStrategyWrapper(
            serialization.get_default_load_sharded_strategy(directory),
            torch.distributed.GroupMember.WORLD,
            exchange_algo=payload["algorithm"],
        )
        return load_plain(state, directory, sharded_strategy=strategy, **options)

    def counted(self: Any, view: torch.Tensor) -> torch.Tensor:
        given.append(self.numel)
        return real(self, view)

    dist_checkpointing.load = load
    coded.CodedShard.real = counted
    return {**resume(payload), "given": len(given)}


def load_damaged(payload: dict[str, Any]) -> dict[str, Any]:
    """Cut the largest file of a checkpoint short, or spoil its first archive, and load it."""
    from megatron.core.dist_checkpointing.core import CheckpointingException

    if torch.distributed.get_rank() == 0:
        found = Path(payload["directory"]).rglob("*.distcp")
        files = sorted(found, key=lambda path: path.stat().st_size)
        with files[-1].open("r+b") as file:
            if payload["damage"] == "cut":
                file.truncate(files[-1].stat().st_size // 2)
            else:
                file.write(b"\xff" * 64)
    torch.distributed.barrier()
    try:
        job.resume(payload)
    except CheckpointingException as error:  # what callers of Megatron's load catch
        sent: Any = pickle.loads(pickle.dumps(error))
        both = isinstance(error, CheckpointError) and type(sent) is CheckpointError
        return {"error": str(error), "is_ours": both and str(sent) == str(error)}
    return {"error": ""}

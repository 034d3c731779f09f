"""Loads of hostile directories with install(), on every rank, in one launch."""

from __future__ import annotations

import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import torch

from tests.memory import counted
from tests.writer.hostile import SIGN, changes
from vime_optim.errors import VimeOptimError


def _object(rank: int) -> Any:
    """A stored object beside the tensors, as RNG and extra state are in any release."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    return ShardedObject("random", {"seed": rank}, (2,), (rank,))


def attacks(root: str, names: list[str] | None = None) -> dict[str, Any]:
    """Load a copy of a good checkpoint after each change. What each rank saw, by name."""
    from tests.writer.readback import snapshot
    from tests.writer.scenarios import Trainer, rank
    from vime_optim.tools.bits import same_bits

    trainer = Trainer(sharding="fully_reshardable")
    plain_state = trainer.state
    trainer.state = lambda *a, **k: {**plain_state(*a, **k), "random": _object(rank())}  # type: ignore[method-assign]
    trainer.step()
    good, _ = trainer.save(Path(root) / "good", is_async=False)
    found = {}
    tracemalloc.start()  # to the end, since loads leave threads behind
    for number, (name, change) in enumerate(changes().items()):
        if names is not None and name not in names:
            continue
        folder = Path(root) / f"case{number}" / good.name
        if rank() == 0:
            shutil.copytree(good, folder)
            change(folder)
        torch.distributed.barrier()
        template = trainer.state(is_loading=True)
        before = snapshot(template)
        outcome: dict[str, Any] = {"type": None, "text": "", "ours": False}
        try:
            with counted() as memory:
                trainer.load(folder, template)
        except BaseException as error:
            outcome = {
                "type": type(error).__name__,
                "text": str(error),
                "ours": isinstance(error, VimeOptimError),
            }
        outcome["held_bytes"] = memory.peak_bytes
        outcome["ran"] = (folder.parent / SIGN).exists()
        after = snapshot(template)
        outcome["unchanged"] = all(same_bits(before[key], after[key]) for key in before)
        found[name] = outcome
        torch.distributed.barrier()
        if rank() == 0:
            shutil.rmtree(folder.parent, ignore_errors=True)
    return found

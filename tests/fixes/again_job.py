"""Loads a checkpoint and saves it again, elsewhere; loads it again."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from vime_optim.verify import checkpointing, job
from vime_optim.verify.directory import iteration_dir


def resave(payload: dict[str, Any]) -> dict[str, Any]:
    _, built = job._start(payload, loading=True)
    checkpointing.load(built, Path(payload["directory"]), payload["step"])
    checkpointing.save(built, Path(payload["again"]), None)
    return {"hits": {}}


def save_arguments(payload: dict[str, Any]) -> dict[str, Any]:
    """As Megatron's training loop does, with its parsed arguments in the common state."""
    from megatron.core import dist_checkpointing

    case, built = job._start(payload, loading=False)
    state = checkpointing._state_dict(
        built, checkpointing.optimizer_metadata(case.sharding), is_loading=False
    )
    target = iteration_dir(Path(payload["directory"]), 0)
    target.mkdir(parents=True)
    dist_checkpointing.save({**state, "args": Namespace(lr=0.5)}, str(target))
    return {}


def load_twice(payload: dict[str, Any]) -> dict[str, Any]:
    """As jobs do that load a reference model beside the one they train."""
    from megatron.core import dist_checkpointing

    case, built = job._start(payload, loading=True)
    source = str(iteration_dir(Path(payload["directory"]), 0))
    before = torch.serialization.get_safe_globals()
    found = []
    for _ in range(2):
        metadata = checkpointing.optimizer_metadata(case.sharding)
        template = checkpointing._state_dict(built, metadata, is_loading=True)
        loaded = dist_checkpointing.load(template, source)
        built.optimizer.load_state_dict(loaded["optimizer"])
        found.append(loaded["args"].lr)
    lost = set(before) - set(torch.serialization.get_safe_globals())
    return {"found": found, "lost": [str(entry) for entry in lost], "had": len(before)}

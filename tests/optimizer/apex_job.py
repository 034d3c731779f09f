"""Saves a job, and loads it into one that was trained; what every param group holds comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vime_optim.optimizer.kinds import sub_optimizers
from vime_optim.verify import checkpointing, job
from vime_optim.verify.capture import chained
from vime_optim.verify.model import Job
from vime_optim.verify.train import train


def save(payload: dict[str, Any]) -> dict[str, Any]:
    answer = job.save(payload)
    return {**answer, "groups": _last.pop()}


def resume_trained(payload: dict[str, Any]) -> dict[str, Any]:
    """The loading job has taken another number of steps, so nothing of its own may stay."""
    case, built = job._start(payload, loading=True)
    train(built, payload["step"] + 1)
    built.scheduler.num_steps = 0  # Megatron's scheduler adds what it loads to what it has
    checkpointing.load(built, Path(payload["directory"]), payload["step"])
    memory = job._capture(payload, built, "loaded")
    train(built, case.total_steps)
    answer = job._finish(payload, built, "resumed")
    return {**answer, "memory": memory, "groups": _last.pop()}


_last: list[list[dict[str, Any]]] = []
_finish = job._finish


def _finish_and_look(payload: dict[str, Any], built: Job, name: str) -> dict[str, Any]:
    _last.append(list(_groups(built)))
    return _finish(payload, built, name)


job._finish = _finish_and_look


def _groups(built: Job) -> Any:
    """Of the innermost optimizers: number of parameters, and values as (kind, value)."""
    for member in chained(built.optimizer):
        for optimizer in sub_optimizers(member.optimizer):
            for group in optimizer.param_groups:
                values = {key: _plain(group[key]) for key in ("step", "lr") if key in group}
                yield {"params": len(group["params"]), **values}


def _plain(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [f"{value.dtype} {tuple(value.shape)}", value.tolist()]
    return [type(value).__name__, value]

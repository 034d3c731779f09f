"""Saves a chain of which one optimizer has moments and no step, and loads it into one that has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vime_optim.optimizer.steps import read_step, write_step
from vime_optim.verify import checkpointing, job
from vime_optim.verify.capture import chained
from vime_optim.verify.model import Job
from vime_optim.verify.train import train

STEPS = 2


def save(payload: dict[str, Any]) -> dict[str, Any]:
    case, built = job._start(payload, loading=False)
    train(built, STEPS)
    write_step(_experts(built), 0)
    checkpointing.save(built, Path(payload["directory"]), None)
    return _go_on(payload, case, built, "after_save")


def resume(payload: dict[str, Any]) -> dict[str, Any]:
    case, built = job._start(payload, loading=True)
    for member in chained(built.optimizer):
        write_step(member.optimizer, 5)
    checkpointing.load(built, Path(payload["directory"]), STEPS)
    return _go_on(payload, case, built, "resumed")


def _experts(built: Job) -> Any:
    return chained(built.optimizer)[1].optimizer


def _go_on(payload: dict[str, Any], case: Any, built: Job, name: str) -> dict[str, Any]:
    steps = [read_step(member.optimizer) for member in chained(built.optimizer)]
    train(built, case.total_steps)
    return {**job._finish(payload, built, name), "steps": steps}

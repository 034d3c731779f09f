"""Saves a job before its first step, loads it into another, and trains both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vime_optim.verify import checkpointing, job
from vime_optim.verify.train import train


def save(payload: dict[str, Any]) -> dict[str, Any]:
    case, built = job._start(payload, loading=False)
    checkpointing.save(built, Path(payload["directory"]), None)
    train(built, case.total_steps)
    return job._finish(payload, built, "after_save")


def resume(payload: dict[str, Any]) -> dict[str, Any]:
    case, built = job._start(payload, loading=True)
    checkpointing.load(built, Path(payload["directory"]), 0)
    train(built, case.total_steps)
    return job._finish(payload, built, "resumed")


def save_again(payload: dict[str, Any]) -> dict[str, Any]:
    """Save before the first step, train, and save over it what the training made."""
    case, built = job._start(payload, loading=False)
    checkpointing.save(built, Path(payload["directory"]) / "again", None)
    train(built, case.total_steps)
    checkpointing.save(built, Path(payload["directory"]) / "again_2", None)
    return job._finish(payload, built, "saved_again")

"""Loads a checkpoint and saves it again, elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vime_optim.verify import checkpointing, job


def resave(payload: dict[str, Any]) -> dict[str, Any]:
    _, built = job._start(payload, loading=True)
    checkpointing.load(built, Path(payload["directory"]), payload["step"])
    checkpointing.save(built, Path(payload["again"]), None)
    return {"hits": {}}

"""Phases of a verify job that check the restored optimizer, and then break it in known ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import vime_optim
from vime_optim.errors import OptimizerStateError
from vime_optim.verify import checkpointing, job
from vime_optim.verify.capture import chained


def _complaint(optimizer: Any) -> str:
    try:
        vime_optim.check_optimizer(optimizer)
    except OptimizerStateError as error:
        return str(error)
    return ""


def check(payload: dict[str, Any]) -> dict[str, Any]:
    """Load and check; then alias two moments, and make one a view of something larger."""
    _, built = job._start(payload, loading=True)
    checkpointing.load(built, Path(payload["directory"]), payload["step"])
    answers = {"sound": _complaint(built.optimizer)}
    inner = chained(built.optimizer)[0].optimizer
    state = next(s for s in inner.state.values() if "exp_avg" in s)
    own = state["exp_avg"]
    state["exp_avg"] = state["exp_avg_sq"]
    answers["aliased"] = _complaint(built.optimizer)
    state["exp_avg"] = torch.zeros(own.numel() * 2, dtype=own.dtype, device=own.device)[
        : own.numel()
    ]
    answers["oversized"] = _complaint(built.optimizer)
    state["exp_avg"] = own
    answers["mended"] = _complaint(built.optimizer)
    return answers

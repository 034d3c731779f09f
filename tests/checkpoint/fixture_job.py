"""What every rank of a fixture's launch runs: the verify job with a very small model."""

from __future__ import annotations

import sys
import types
from typing import Any

SIZES = {
    "HIDDEN_SIZE": 8,
    "HEAD_SIZE": 6,
    "NUM_HEADS": 2,
    "NUM_KV_HEADS": 1,
    "FFN_SIZE": 10,
    "EXPERT_FFN_SIZE": 8,
    "VOCAB_SIZE": 24,
    "BUCKET_NUMEL": 700,
}


def _shrink() -> None:
    from vime_optim.verify import model, train

    for name, value in SIZES.items():
        if not hasattr(model, name):
            raise AttributeError(f"vime_optim.verify.model has no {name} any more")
        for module in (model, train):
            if hasattr(module, name):
                setattr(module, name, value)


def _name_fused_adam_as_te_does() -> None:
    """The stand-in's class is pickled by name (F9); the name has to be the real one's."""
    from vime_optim.simulate.fused_adam import FusedAdam

    name = "transformer_engine.pytorch.optimizers.fused_adam"
    module = types.ModuleType(name)
    module.FusedAdam = FusedAdam  # type: ignore[attr-defined]
    FusedAdam.__module__ = name
    sys.modules[name] = module


def save(payload: dict[str, Any]) -> dict[str, Any]:
    """Trains and saves with stock megatron-core."""
    from vime_optim.verify import job

    _shrink()
    _name_fused_adam_as_te_does()
    return job.save(payload)


def resume(payload: dict[str, Any]) -> dict[str, Any]:
    """Loads in a fresh process and trains on; returns the facts that the verify job gives."""
    from vime_optim.verify import job

    _shrink()
    return job.resume(payload)

"""What every rank of a fixture's launch runs: the verify job with a very small model."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def _fused_adam_named_as_te_names_it() -> Iterator[None]:
    """The stand-in's class is pickled by name (F9); the name has to be the real one's.

    Only while saving: with a module of that name about, Megatron would take TE for installed.
    """
    from vime_optim.simulate.fused_adam import FusedAdam

    name = "transformer_engine.pytorch.optimizers.fused_adam"
    parts = name.split(".")
    names = [".".join(parts[: count + 1]) for count in range(len(parts))]
    sys.modules.update({part: types.ModuleType(part) for part in names})
    sys.modules[parts[0]].__dict__["__version__"] = "2.20.2"
    sys.modules[name].__dict__["FusedAdam"] = FusedAdam
    before, FusedAdam.__module__ = FusedAdam.__module__, name
    try:
        yield
    finally:
        FusedAdam.__module__ = before
        for part in names:
            del sys.modules[part]


def save(payload: dict[str, Any]) -> dict[str, Any]:
    """Trains and saves with stock megatron-core."""
    from vime_optim.verify import checkpointing, job

    _shrink()
    stock_save = checkpointing.save

    def save_under_te_names(*args: Any) -> None:
        with _fused_adam_named_as_te_names_it():
            stock_save(*args)

    checkpointing.save = save_under_te_names
    return job.save(payload)


def resume(payload: dict[str, Any]) -> dict[str, Any]:
    """Loads in a fresh process and trains on; returns the facts that the verify job gives."""
    from vime_optim.verify import job

    _shrink()
    return job.resume(payload)


def load_and_save(payload: dict[str, Any]) -> dict[str, Any]:
    """Loads `directory` into a fresh job and saves it at once below `saved`."""
    from pathlib import Path

    from vime_optim.verify import checkpointing, job

    _shrink()
    _, made = job._start(payload, loading=True)
    checkpointing.load(made, Path(payload["directory"]), payload["step"])
    with _fused_adam_named_as_te_names_it():
        checkpointing.save(made, Path(payload["saved"]), None)
    return {"iteration": made.iteration}

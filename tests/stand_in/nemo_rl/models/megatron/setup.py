"""Stands in for the module of NeMo-RL, whose function does what Megatron-Bridge's does."""

from __future__ import annotations

from typing import Any

from megatron.bridge.training import optim


def _force_sync_optimizer_fp32_from_model(optimizer: Any, model: Any) -> None:
    vars(optim)["sync_hybrid_device_optimizer_fp32_master_copies"].__wrapped__(optimizer)

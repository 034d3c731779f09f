"""After a load, masters are set from parameters in every way that frameworks have; then trained."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch

from vime_optim.optimizer.kinds import owned_params, param_name
from vime_optim.optimizer.slots import master_slot
from vime_optim.verify import checkpointing, job
from vime_optim.verify.capture import chained
from vime_optim.verify.train import train

STAND_IN = Path(__file__).parents[1] / "stand_in"
BRIDGE = "megatron.bridge.training.optim"
NEMO = "nemo_rl.models.megatron.setup"


def resume(payload: dict[str, Any]) -> dict[str, Any]:
    """A refresh after the load changes nothing; one after other weights came takes those."""
    case, built = job._start(payload, loading=True)
    checkpointing.load(built, Path(payload["directory"]), payload["step"])
    restored = _masters(built)
    moved = {}
    for name, refresh in _ways(built).items():
        refresh()
        moved[name] = [key for key, value in _masters(built).items() if value != restored[key]]
    train(built, case.total_steps)
    answer = job._finish(payload, built, "resumed")
    stale = {name: _stale(built, refresh) for name, refresh in _ways(built).items()}
    return {**answer, "moved": moved, "stale": stale, "hits": job._hits(case)}


def _ways(built: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"reload_model_params": built.optimizer.reload_model_params}
    if built.backend.optimizer == "hybrid":
        _show_frameworks()
        bridge, nemo = importlib.import_module(BRIDGE), importlib.import_module(NEMO)
        sync = bridge.sync_hybrid_device_optimizer_fp32_master_copies
        force = nemo._force_sync_optimizer_fp32_from_model
        found["Megatron-Bridge"] = lambda: sync(built.optimizer)
        found["NeMo-RL"] = lambda: force(built.optimizer, built.model)
    return found


def _show_frameworks() -> None:
    import megatron

    path = str(STAND_IN / "megatron")
    if path not in list(megatron.__path__):
        megatron.__path__ = [*megatron.__path__, path]
        sys.path.append(str(STAND_IN))


@torch.no_grad()
def _stale(built: Any, refresh: Any) -> list[str]:
    """Give the model other weights, refresh, and name masters that are not those."""
    for number, param in enumerate(built.model.parameters()):
        values = torch.linspace(-1, 1, param.numel(), device=param.device).add_(number / 7)
        param.copy_(values.reshape(param.shape).roll(len(refresh.__name__)).neg() + param)
    refresh()
    stale = []
    for member in chained(built.optimizer):
        for param, ranges in owned_params(member):
            shard = param.detach().reshape(-1)[ranges["param"].start : ranges["param"].end]
            if not torch.equal(master_slot(member, param).read().cpu(), shard.float().cpu()):
                stale.append(param_name(member, param))
    return stale


def _masters(built: Any) -> dict[str, list[int]]:
    return {
        param_name(member, param): master_slot(member, param)
        .read()
        .cpu()
        .view(torch.int32)
        .tolist()
        for member in chained(built.optimizer)
        for param, _ in owned_params(member)
    }

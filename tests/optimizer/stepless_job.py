"""The verify job with an optimizer that counts no steps, by its name in Megatron's config."""

from __future__ import annotations

import copy
from typing import Any

import torch

from vime_optim.optimizer.kinds import sub_optimizers
from vime_optim.verify import job
from vime_optim.verify.capture import chained
from vime_optim.verify.model import Job


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum, one moment, no counter; as the paper has it."""

    def __init__(self, params: Any, lr: float, betas: Any, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                moment = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(torch.lerp(param.grad, moment, beta1).sign(), alpha=-group["lr"])
                moment.lerp_(param.grad, 1 - beta2)


def continuous(payload: dict[str, Any]) -> dict[str, Any]:
    return _with_groups(job.continuous, payload)


def save(payload: dict[str, Any]) -> dict[str, Any]:
    return _with_groups(job.save, payload)


def resume(payload: dict[str, Any]) -> dict[str, Any]:
    return _with_groups(job.resume, payload)


def _with_groups(phase: Any, payload: dict[str, Any]) -> dict[str, Any]:
    """Run a phase; its answer has the keys of every param group and state at its end."""
    from megatron.core import optimizer as module

    found: list[Any] = []
    finish, get = job._finish, module._get_megatron_optimizer_based_on_param_groups

    def look(payload: dict[str, Any], built: Job, name: str) -> dict[str, Any]:
        for member in chained(built.optimizer):
            for part in sub_optimizers(member.optimizer):
                states = {str(key) for state in part.state.values() for key in state}
                found.append([type(part).__name__, sorted(states)])
                found.extend(sorted(group) for group in part.param_groups)
        return finish(payload, built, name)

    def chosen(config: Any, *args: Any, **kwargs: Any) -> Any:
        # Megatron has Lion in a DistributedOptimizer as the scalar optimizer of Muon.
        module.Lion, module.HAVE_EMERGING_OPTIMIZERS = Lion, True
        config = copy.copy(config)
        config.optimizer, config.sgd_momentum = payload["optimizer"], payload["momentum"]
        return get(config, *args, **kwargs)

    job._finish, module._get_megatron_optimizer_based_on_param_groups = look, chosen
    try:
        return {**phase(payload), "groups": found}
    finally:
        job._finish, module._get_megatron_optimizer_based_on_param_groups = finish, get

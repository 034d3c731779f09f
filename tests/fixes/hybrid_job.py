"""A HybridDeviceOptimizer on its own: steps, its state_dict(), and a load into a fresh one."""

from __future__ import annotations

import copy
from typing import Any

import torch

import vime_optim
from vime_optim.simulate import megatron


def _optimizer(fraction: float, dtype: torch.dtype) -> tuple[Any, list[torch.nn.Parameter]]:
    from megatron.core.optimizer.cpu_offloading import hybrid_optimizer

    # Values that bfloat16 does not hold, so that a master is more than its parameter.
    params = [
        torch.nn.Parameter(torch.linspace(-1.0, 1.0, numel, device="cuda").to(dtype))
        for numel in (16, 24, 8, 32)
    ]
    optimizer = hybrid_optimizer.HybridDeviceOptimizer(
        params,
        offload_fraction=fraction,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=True,
        pin_cpu_grads=False,
        lr=0.01,
    )
    return optimizer, params


def _step(optimizer: Any, params: list[torch.nn.Parameter], number: int) -> None:
    for index, param in enumerate(params):
        values = torch.arange(param.numel(), device="cuda").add(index + number)
        param.grad = values.sin().to(param.dtype)
    optimizer.step()


def _bits(optimizer: Any, params: list[torch.nn.Parameter]) -> dict[str, list[list[int]]]:
    masters = [optimizer.param_to_inner_param[param].detach() for param in params]
    return {
        "masters": [m.float().cpu().view(torch.int32).tolist() for m in masters],
        "params": [p.detach().float().cpu().view(torch.int32).tolist() for p in params],
    }


def _halves(optimizer: Any, params: list[torch.nn.Parameter]) -> list[str]:
    held = (optimizer.param_to_inner_param[param] for param in params)
    return ["device" if master.is_cuda else "host" for master in held]


def reload(payload: dict[str, Any]) -> dict[str, Any]:
    """Three steps, state_dict() into a fresh optimizer, and two more steps of both."""
    megatron.prepare("torch")
    vime_optim.install()
    dtype = getattr(torch, payload["dtype"])
    first, first_params = _optimizer(payload["fraction"], dtype)
    for number in range(3):
        _step(first, first_params, number)
    saved = copy.deepcopy(first.state_dict())  # as from a file: it shares nothing
    at_save = _bits(first, first_params)
    fresh, fresh_params = _optimizer(payload["fraction"], dtype)
    with torch.no_grad():
        for mine, theirs in zip(fresh_params, first_params, strict=True):
            mine.copy_(theirs)  # the model is loaded first
    fresh.load_state_dict(saved)
    loaded = _bits(fresh, fresh_params)
    for number in (3, 4):
        _step(first, first_params, number)
        _step(fresh, fresh_params, number)
    return {
        "halves": _halves(fresh, fresh_params),
        "saved": at_save,
        "loaded": loaded,
        "went_on": _bits(first, first_params),
        "resumed": _bits(fresh, fresh_params),
    }


def fresh_state(payload: dict[str, Any]) -> dict[str, Any]:
    """dummy_step() of a new optimizer: what it moved, and the moments that it made."""
    megatron.prepare("torch")
    vime_optim.install()
    optimizer, params = _optimizer(0.5, torch.bfloat16)
    before = _bits(optimizer, params)
    generators = [torch.get_rng_state(), torch.cuda.get_rng_state()]
    optimizer.dummy_step()
    after = [torch.get_rng_state(), torch.cuda.get_rng_state()]
    moments = [
        value
        for state in optimizer.state.values()
        for name, value in state.items()
        if name.startswith("exp_avg")
    ]
    return {
        "rng_untouched": all(torch.equal(a, b) for a, b in zip(generators, after, strict=True)),
        "params_untouched": _bits(optimizer, params) == before,
        "moments": len(moments),
        "non_zero": sum(int(value.count_nonzero()) for value in moments),
    }

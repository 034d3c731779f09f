"""Optimizer state made without drawing random numbers and without moving a parameter.

Megatron makes the state of a HybridDeviceOptimizer by stepping with random gradients, and that of
torch's Adam not at all. Here each optimizer's own initialisation is called, and only that.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vime_optim.errors import OptimizerStateError
from vime_optim.optimizer.kinds import (
    is_apex,
    is_hybrid,
    is_native,
    is_transformer_engine,
    sub_optimizers,
)
from vime_optim.optimizer.steps import read_step, write_step


def ensure_state(dist_opt: Any) -> None:
    """Make the state of every parameter that has none. State that exists stays as it is."""
    inner = dist_opt.optimizer
    if is_hybrid(inner):
        ensure_hybrid_state(inner)
        return
    _ensure(inner, getattr(dist_opt, "init_state_fn", None), dist_opt.config)


def ensure_saveable(dist_opt: Any) -> None:
    """Make the state of parameters that were never stepped, before a save: zero moments.

    A save may come before the first step; and without the fix `device-gradients` CPU offload never
    steps the float32 parameters that stay on the device.
    """
    inner = dist_opt.optimizer
    step = read_step(inner)
    held = _count_states(inner)
    ensure_state(dist_opt)
    if step is not None and _count_states(inner) != held:
        write_step(inner, step)  # a checkpoint holds one step for all parameters


def _count_states(inner: Any) -> int:
    return sum(len(optimizer.state) for optimizer in sub_optimizers(inner))


def ensure_hybrid_state(hybrid: Any) -> None:
    """The same for a HybridDeviceOptimizer alone."""
    for optimizer in hybrid.sub_optimizers:
        _ensure(optimizer, None, None)
    hybrid._sync_sub_optimizers_state_to_hdo()


def _ensure(optimizer: Any, init_state_fn: Any, config: Any) -> None:
    missing = [
        (group, param)
        for group in optimizer.param_groups
        for param in group["params"]
        if param.numel() and not optimizer.state.get(param)
    ]
    if not missing:
        return
    if is_transformer_engine(optimizer) and hasattr(optimizer, "initialize_state"):
        for _, param in missing:
            _initialize_fused(optimizer, param)
    elif is_native(optimizer) and hasattr(optimizer, "_init_group"):
        _initialize_native(optimizer, missing)
    elif is_apex(optimizer):
        for _, param in missing:
            # In float32 whatever the parameter is; Megatron's own way takes the parameter's dtype.
            optimizer.state[param].update(
                exp_avg=torch.zeros_like(param.detach(), dtype=torch.float32),
                exp_avg_sq=torch.zeros_like(param.detach(), dtype=torch.float32),
            )
    elif init_state_fn is not None:
        init_state_fn(optimizer, config)
    else:
        _step_without_effect(optimizer, [param for _, param in missing])


def _initialize_fused(optimizer: Any, param: torch.Tensor) -> None:
    remainders = bool(
        getattr(optimizer, "store_param_remainders", False) and param.dtype == torch.bfloat16
    )
    takes = inspect.signature(optimizer.initialize_state).parameters
    if "store_param_remainders" in takes:
        optimizer.initialize_state(param, remainders)
    else:
        optimizer.initialize_state(param)


def _initialize_native(optimizer: Any, missing: list[tuple[dict[str, Any], torch.Tensor]]) -> None:
    """torch's own lazy initialisation, which runs for parameters that have a gradient."""
    by_group: dict[int, tuple[dict[str, Any], list[torch.Tensor]]] = {}
    for group, param in missing:
        by_group.setdefault(id(group), (group, []))[1].append(param)
    for group, params in by_group.values():
        kept = [(param, param.grad) for param in params]
        try:
            for param in params:
                # One element seen as many: the gradient is looked at, never used.
                param.grad = torch.zeros((), dtype=param.dtype, device=param.device).expand(
                    param.shape
                )
            only = {**group, "params": params}
            slots = len(inspect.signature(optimizer._init_group).parameters) - 1
            optimizer._init_group(only, *([] for _ in range(slots)))
        finally:
            for param, grad in kept:
                param.grad = grad


@contextmanager
def _without_post_hooks(optimizer: Any) -> Iterator[None]:
    """CPU offload copies what a part has stepped to the device, which nothing would undo."""
    hooks = optimizer.__dict__.get("_optimizer_step_post_hooks")
    if hooks is not None:
        optimizer._optimizer_step_post_hooks = type(hooks)()
    try:
        yield
    finally:
        if hooks is not None:
            optimizer._optimizer_step_post_hooks = hooks


def _step_without_effect(optimizer: Any, missing: list[torch.Tensor]) -> None:
    """For an optimizer that offers no initialisation: a step on zero gradients, then undone.

    Parameters that have state get no gradient, so that they and their state stay as they are. One
    that makes no state at all (SGD without momentum) has none to restore.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    fresh = {id(param) for param in missing}
    before = [(param.detach().clone(), param.grad) for param in params]
    # A counter may be a tensor that the step advances in place.
    steps = [copy.deepcopy(group.get("step")) for group in optimizer.param_groups]
    for param in params:
        param.grad = torch.zeros_like(param) if id(param) in fresh else None
    with _without_post_hooks(optimizer):
        optimizer.step()
    for param, (value, grad) in zip(params, before, strict=True):
        param.detach().copy_(value)
        param.grad = grad
    for group, step in zip(optimizer.param_groups, steps, strict=True):
        if step is None:
            group.pop("step", None)
        else:
            group["step"] = step
    made = [bool(optimizer.state.get(param)) for param in params if param.numel()]
    if any(made) and not all(made):
        raise OptimizerStateError(
            "an optimizer made no state on its first step",
            where=f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
            next_step="this optimizer cannot be restored; report it to vime_optim",
        )

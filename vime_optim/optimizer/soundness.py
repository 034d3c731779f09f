"""check_optimizer: does every state of an optimizer own its storage, and no byte more?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from vime_optim.errors import OptimizerStateError
from vime_optim.optimizer.kinds import (
    STATE_MASTER,
    has_buffers,
    is_hybrid,
    members,
    owned_params,
    param_name,
    sub_optimizers,
)
from vime_optim.optimizer.kinds import optimizer_param as inner_key
from vime_optim.optimizer.steps import read_step


@dataclass(frozen=True)
class _State:
    where: str
    tensor: torch.Tensor
    device: torch.device


def check_optimizer(optimizer: Any) -> None:
    """Check a Megatron optimizer (ChainedOptimizer, DistributedOptimizer) after a restore.

    Every state tensor must own its storage: no other state shares it, and it holds no byte more
    than the state has. It must be on the device of the parameter that it belongs to, contiguous,
    and of a dtype that the optimizer makes. All step counters must agree.

    Raises:
        OptimizerStateError: naming the state and parameter at fault.
    """
    for dist_opt in _distributed(optimizer):
        if not has_buffers(dist_opt):
            continue
        read_step(dist_opt.optimizer)
        for part in sub_optimizers(dist_opt.optimizer):
            _check_groups(part)
        owners: dict[tuple[torch.device, int], str] = {}
        for state in _states(dist_opt):
            _check_one(state)
            _check_alias(state, owners)


def _distributed(optimizer: Any) -> list[Any]:
    found = list(members(optimizer))
    for part in found:
        if not hasattr(part, "optimizer"):
            raise OptimizerStateError(
                "not a Megatron optimizer",
                got=type(part).__qualname__,
                expected="a DistributedOptimizer or a ChainedOptimizer of them",
            )
    return [part for part in found if hasattr(part, "ddp_config")]


def _check_groups(optimizer: Any) -> None:
    owners: dict[tuple[torch.device, int], int] = {}
    for number, group in enumerate(optimizer.param_groups):
        for key in ("step", "lr"):
            value = group.get(key)
            if not isinstance(value, torch.Tensor) or not group["params"]:
                continue
            place = (value.device, value.untyped_storage().data_ptr())
            if owners.setdefault(place, number) != number:
                raise OptimizerStateError(
                    "two param groups share one tensor",
                    where=f"{key} of group {number} and of group {owners[place]}",
                    expected="a tensor for each, as a step advances it in place",
                    next_step="restore with vime_optim installed",
                )


def _states(dist_opt: Any) -> Iterator[_State]:
    inner = dist_opt.optimizer
    for model_param, _ in owned_params(dist_opt):
        key = inner_key(dist_opt, model_param)
        holder = inner.param_to_inner_param[key] if is_hybrid(inner) else key
        name = param_name(dist_opt, model_param)
        for state_name, value in inner.state.get(key, {}).items():
            if not isinstance(value, torch.Tensor) or value is key:
                continue  # a float32 parameter is its own master: a view of the model's buffer
            # A step may stay on the host for a parameter on the device; it is checked by value.
            device = value.device if state_name == "step" else holder.device
            yield _State(f"{state_name} of {name}", value, device)
        if is_hybrid(inner) and holder is not key:
            in_state = inner.state.get(key, {}).get(STATE_MASTER)
            if in_state is not None and in_state is not holder:
                raise OptimizerStateError(
                    "a master parameter is kept twice",
                    where=f"{STATE_MASTER} of {name}",
                    got="a tensor beside the one that the optimizer updates",
                    next_step="restore with vime_optim installed",
                )


def _check_one(state: _State) -> None:
    tensor = state.tensor
    own_bytes = tensor.numel() * tensor.element_size()
    held_bytes = _storage_bytes(tensor)
    if held_bytes is not None and held_bytes != own_bytes:
        raise OptimizerStateError(
            "an optimizer state holds more memory than it has",
            where=state.where,
            got=f"{held_bytes} bytes held",
            expected=f"{own_bytes} bytes",
            next_step="restore with vime_optim installed",
        )
    if tensor.device != state.device:
        raise OptimizerStateError(
            "an optimizer state is on another device than its parameter",
            where=state.where,
            got=str(tensor.device),
            expected=str(state.device),
        )
    if not tensor.is_contiguous():
        raise OptimizerStateError("an optimizer state is not contiguous", where=state.where)


def _check_alias(state: _State, owners: dict[tuple[torch.device, int], str]) -> None:
    try:
        pointer = state.tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return  # a wrapper without a storage of its own, such as a quantized tensor
    if pointer == 0:
        return
    key = (state.tensor.device, pointer)
    if key in owners:
        raise OptimizerStateError(
            "two optimizer states share one storage",
            where=f"{owners[key]} and {state.where}",
            next_step="restore with vime_optim installed",
        )
    owners[key] = state.where


def _storage_bytes(tensor: torch.Tensor) -> int | None:
    try:
        return tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):
        return None

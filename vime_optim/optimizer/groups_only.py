"""A stand-in for the inner optimizer that carries param groups and no tensors.

Megatron's DistributedOptimizer calls state_dict() and load_state_dict() of its inner optimizer
only for the param groups and the step: param state travels by itself. FusedAdam copies every
state in both calls, and HybridDeviceOptimizer builds itself anew, which is F18 and a part of F8
and F10. While Megatron's method runs, `self.optimizer` is this proxy, and nothing is copied.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import wrapt

from vime_optim.errors import CheckpointError
from vime_optim.optimizer.kinds import counts_steps_in, is_hybrid, sub_optimizers
from vime_optim.optimizer.steps import read_step

_HYBRID_SETTINGS = frozenset(
    {
        "offload_fraction",
        "cpu_optimizer_cls",
        "gpu_optimizer_cls",
        "param_update_in_fp32",
        "pin_cpu_grads",
        "pin_cpu_params",
        "overlap_cpu_optimizer_d2h_h2d",
    }
)
"""How a HybridDeviceOptimizer was built. It is this run's choice, never a checkpoint's."""

_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Which of its implementations torch's Adam runs. They round differently, and keep the step in
other places. CPU offload saves fused=True, which torch's Adam on the device must not take over."""


COUNTS = "vime_optim_counts_steps"
"""Key beside saved param groups of an optimizer that counts its steps. A group of it without a step
holds none of this rank's parameters; where the key is missing, groups have no step to be filled."""


class GroupsOnly(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """Passes for the inner optimizer (isinstance included), except in these two methods.

    With `matched`, the saved groups in this optimizer's order, a load takes those, whatever
    Megatron's own matching made of them (F24).
    """

    def __init__(self, inner: Any, matched: list[dict[str, Any]] | None = None) -> None:
        super().__init__(inner)
        self._self_matched = matched

    def state_dict(self) -> dict[str, Any]:
        inner = self.__wrapped__
        packed = torch.optim.Optimizer.state_dict(inner)
        # Without Transformer Engine and Apex, Megatron takes the step from the states and insists
        # on exactly one value, also before the first step.
        step = torch.tensor(float(read_step(inner) or 0))
        groups = [clean_group(group) for group in packed["param_groups"]]
        for group in groups:
            if isinstance(group.get("step"), torch.Tensor):
                # Under capturable. Megatron compares the groups' steps as numbers.
                group["step"] = int(group["step"])
        return {"state": {0: {"step": step}}, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        load_groups(self.__wrapped__, self._self_matched or state_dict["param_groups"])


def load_groups(inner: Any, saved_groups: list[dict[str, Any]]) -> None:
    """Take hyperparameters from saved groups, in order; parameters and tensors stay.

    What only says how an optimizer computes is this run's choice.

    Raises:
        CheckpointError: another number of groups.
    """
    if len(saved_groups) != len(inner.param_groups):
        raise CheckpointError(
            "the checkpoint has another number of param groups",
            got=len(saved_groups),
            expected=len(inner.param_groups),
            next_step="load with the same weight decay and learning rate options",
        )
    seen: set[int] = set()
    for group, saved in zip(inner.param_groups, saved_groups, strict=True):
        for key, value in clean_group(saved).items():
            if key not in _IMPLEMENTATION and key not in ("params", "step"):
                group[key] = _in_kind_of(group.get(key), value, seen)
    if is_hybrid(inner):
        inner._sync_hdo_param_groups_to_sub_optimizers()


def _in_kind_of(own: Any, value: Any, seen: set[int]) -> Any:
    """A saved hyperparameter as this optimizer keeps it: a number, or a tensor of its own.

    A learning rate is a tensor under capturable. One that is no other group's is filled in place:
    a CUDA graph may hold on to it.
    """
    if isinstance(own, torch.Tensor) and isinstance(value, (int, float, torch.Tensor)):
        if own.untyped_storage().data_ptr() in seen:
            own = own.clone()
        seen.add(own.untyped_storage().data_ptr())
        return own.copy_(value) if isinstance(value, torch.Tensor) else own.fill_(value)
    if isinstance(value, torch.Tensor):
        # Saved by a capturable optimizer, and this one keeps a number.
        return value.item() if isinstance(own, (int, float)) else value.detach().clone()
    return value


def clean_group(group: dict[str, Any]) -> dict[str, Any]:
    """A param group without classes and without HybridDeviceOptimizer's construction settings.

    A tensor (a learning rate under capturable) is a copy on the host: what is saved neither changes
    with the optimizer nor needs its device.
    """
    return {
        key: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key not in _HYBRID_SETTINGS and not inspect.isclass(value)
    }


@contextmanager
def groups_only(dist_opt: Any, matched: list[dict[str, Any]] | None = None) -> Iterator[Any]:
    """`dist_opt.optimizer` is a GroupsOnly proxy in this block; yields the real one."""
    inner = dist_opt.optimizer
    dist_opt.optimizer = GroupsOnly(inner, matched)
    try:
        yield inner
    finally:
        dist_opt.optimizer = inner


def saved_step(groups: list[dict[str, Any]]) -> int | None:
    """The step that a checkpoint's param groups record, or None. The highest one is the truth:
    FusedAdam of older releases does not advance groups that are empty on a rank."""
    steps = [int(group["step"]) for group in groups if group.get("step") is not None]
    return max(steps, default=None)


def step_into_groups(inner: Any, groups: list[dict[str, Any]]) -> None:
    """Record the optimizer's step in every saved group, where Megatron's loaders look for it.

    One that holds no parameter of this rank knows no step, and must not claim to be at 0; one that
    counts none records none.
    """
    step = read_step(inner)
    in_groups = any(counts_steps_in(part) == "groups" for part in sub_optimizers(inner))
    for group in groups:
        if step is not None:
            group["step"] = step
        elif not in_groups:
            group.pop("step", None)

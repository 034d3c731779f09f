"""HybridDeviceOptimizer restores every parameter, on its own device and in its own storage.

Symptom: load dies with KeyError in _update_fp32_params_by_new_state (F5); FusedAdam's counter
freezes (F4).
Cause: each method serves one configuration (bf16 parameters, all of them offloaded) and is
called under others.
Changes: see each wrapper.
Leaves alone: step(), how parameters are split between host and device.
Remove when: each target is diagnosed as fixed upstream.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from vime_optim.fixes.places import DISTRIBUTED, HYBRID
from vime_optim.optimizer.kinds import STATE_MASTER
from vime_optim.probe import has_patch
from vime_optim.registry import (
    NEEDED,
    Diagnosis,
    Fix,
    Hit,
    Target,
    fixed_upstream,
    takes,
    unless_patched,
)


def _wrap_sync_groups(original: Any, hit: Hit) -> Any:
    def sync_hdo_param_groups_to_sub_optimizers(self: Any) -> None:
        # The parts count by themselves. A counter that a checkpoint put into the hybrid's own
        # groups would be copied over theirs before every step.
        hit()
        for group in self.param_groups:
            group.pop("step", None)
        original(self)

    return sync_hdo_param_groups_to_sub_optimizers


def _wrap_update_masters(original: Any, hit: Hit) -> Any:
    """Replaced: Megatron looks up every parameter among those that have a float32 copy."""

    @torch.no_grad()
    def update_fp32_params_by_new_state(self: Any) -> None:
        hit()
        if not self.param_update_in_fp32:
            return
        for param, state in self.state.items():
            loaded = state.get(STATE_MASTER)
            held = self.param_to_inner_param[param]
            if loaded is not None and loaded is not held:
                held.detach().copy_(loaded.detach())

    return update_fp32_params_by_new_state


def _wrap_sync_state(original: Any, hit: Hit) -> Any:
    def sync_hdo_state_to_sub_optimizers(self: Any) -> None:
        hit()
        original(self)
        # A master has one storage: the one that the part updates. Another copy kept in `state`
        # would hold its bytes twice and go stale.
        if self.param_update_in_fp32:
            for param, state in self.state.items():
                if STATE_MASTER in state:
                    state[STATE_MASTER] = self.param_to_inner_param[param]

    return sync_hdo_state_to_sub_optimizers


def _wrap_move_state(original: Any, hit: Hit) -> Any:
    """Replaced: Megatron tells the parts apart by class, and both may be torch's AdamW."""

    def move_new_state_to_right_device(self: Any) -> None:
        hit()
        for optimizer in self.sub_optimizers:
            for param, state in optimizer.state.items():
                shared = self.state[self.inner_param_to_orig_param.get(param, param)]
                for name, value in state.items():
                    if not isinstance(value, torch.Tensor) or name in ("step", STATE_MASTER):
                        continue
                    if value.is_cuda != param.is_cuda:
                        shared[name] = state[name] = value.to("cuda" if param.is_cuda else "cpu")

    return move_new_state_to_right_device


def _wrap_build_shards(original: Any, hit: Hit) -> Any:
    def build_model_and_main_param_groups(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # A shard of a float32 parameter is a view of it, which autograd follows; torch then takes
        # no such tensor into a new optimizer, and CPU offload builds one. A shard only holds data.
        hit()
        with torch.no_grad():
            return original(cls, *args, **kwargs)

    return build_model_and_main_param_groups


def _diagnose_sync_state(module: ModuleType, original: Any) -> Diagnosis:
    if has_patch(module, "lookups"):
        return fixed_upstream("patch lookups is there")  # it keeps one storage a master
    return takes("self")(module, original)


FIX = Fix(
    id="hybrid-restore",
    faults=("F4", "F5"),
    summary="HybridDeviceOptimizer restores every parameter, on its own device and storage",
    targets=(
        Target(
            DISTRIBUTED,
            "DistributedOptimizer._build_model_and_main_param_groups",
            _wrap_build_shards,
            lambda module, original: NEEDED,
        ),
        Target(
            HYBRID,
            "HybridDeviceOptimizer._sync_hdo_param_groups_to_sub_optimizers",
            _wrap_sync_groups,
            unless_patched("counter"),
        ),
        Target(
            HYBRID,
            "HybridDeviceOptimizer._update_fp32_params_by_new_state",
            _wrap_update_masters,
            unless_patched("lookups"),
        ),
        Target(
            HYBRID,
            "HybridDeviceOptimizer._sync_hdo_state_to_sub_optimizers",
            _wrap_sync_state,
            _diagnose_sync_state,
        ),
        Target(
            HYBRID,
            "HybridDeviceOptimizer._move_new_state_to_right_device",
            _wrap_move_state,
            unless_patched("native"),
        ),
    ),
)

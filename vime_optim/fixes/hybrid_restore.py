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

from vime_optim.fixes.places import DISTRIBUTED_OPTIMIZER, HYBRID_OPTIMIZER
from vime_optim.optimizer.kinds import STATE_MASTER
from vime_optim.probe import has_patch
from vime_optim.registry import Diagnosis, Fix, Hit, fixed_upstream, takes, unless_patched

FIX = Fix(
    id="hybrid-restore",
    faults=("F4", "F5"),
    summary="HybridDeviceOptimizer restores every parameter, on its own device and storage",
)


@FIX.wraps(HYBRID_OPTIMIZER, "_sync_hdo_param_groups_to_sub_optimizers", unless_patched("counter"))
def _sync_groups(original: Any, hit: Hit, self: Any) -> None:
    # The parts count by themselves. A counter that a checkpoint put into the hybrid's own
    # groups would be copied over theirs before every step.
    hit()
    for group in self.param_groups:
        group.pop("step", None)
    original(self)


@FIX.wraps(HYBRID_OPTIMIZER, "_update_fp32_params_by_new_state", unless_patched("lookups"))
@torch.no_grad()
def _update_masters(original: Any, hit: Hit, self: Any) -> None:
    """Replaced: Megatron looks up every parameter among those that have a float32 copy."""
    hit()
    if not self.param_update_in_fp32:
        return
    for param, state in self.state.items():
        loaded = state.get(STATE_MASTER)
        held = self.param_to_inner_param[param]
        if loaded is not None and loaded is not held:
            held.detach().copy_(loaded.detach())


def _diagnose_sync_state(module: ModuleType, original: Any) -> Diagnosis:
    if has_patch(module, "lookups"):
        return fixed_upstream("patch lookups is there")  # it keeps one storage a master
    return takes("self")(module, original)


@FIX.wraps(HYBRID_OPTIMIZER, "_sync_hdo_state_to_sub_optimizers", _diagnose_sync_state)
def _sync_state(original: Any, hit: Hit, self: Any) -> None:
    hit()
    original(self)
    # A master has one storage: the one that the part updates. Another copy kept in `state`
    # would hold its bytes twice and go stale.
    if self.param_update_in_fp32:
        for param, state in self.state.items():
            if STATE_MASTER in state:
                state[STATE_MASTER] = self.param_to_inner_param[param]


@FIX.wraps(HYBRID_OPTIMIZER, "_move_new_state_to_right_device", unless_patched("native"))
def _move_state(original: Any, hit: Hit, self: Any) -> None:
    """Replaced: Megatron tells the parts apart by class, and both may be torch's AdamW."""
    hit()
    for optimizer in self.sub_optimizers:
        for param, state in optimizer.state.items():
            shared = self.state[self.inner_param_to_orig_param.get(param, param)]
            for name, value in state.items():
                if not isinstance(value, torch.Tensor) or name in ("step", STATE_MASTER):
                    continue
                if value.is_cuda != param.is_cuda:
                    shared[name] = state[name] = value.to("cuda" if param.is_cuda else "cpu")


@FIX.wraps(DISTRIBUTED_OPTIMIZER, "_build_model_and_main_param_groups")
def _build_shards(original: Any, hit: Hit, *args: Any, **kwargs: Any) -> Any:
    # A shard of a float32 parameter is a view of it, which autograd follows; torch then takes
    # no such tensor into a new optimizer, and CPU offload builds one. A shard only holds data.
    hit()
    with torch.no_grad():
        return original(*args, **kwargs)

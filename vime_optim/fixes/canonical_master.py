"""The float32 master parameter is the canonical value of fully_reshardable.

Symptom: load asserts in set_scaled_state under PAO with remainders (F7).
Cause: Megatron gathers whatever FusedAdam keeps, which may be the 16 low bits of the master, as if
it were the master itself.
Changes: while a fully reshardable (or dp_zero) state is gathered, states are read as float32
values; RemainderSlot puts a master back as parameter bits and remainder.
Leaves alone: dp_reshardable, which keeps FusedAdam's own codes, as Megatron writes them.
Remove when: Megatron decodes remainders in get_parameter_state_dp_zero.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from vime_optim.fixes.places import DISTRIBUTED
from vime_optim.optimizer.record import canonical
from vime_optim.probe import has_patch, missing_parameters
from vime_optim.registry import NEEDED, Diagnosis, Fix, Hit, Target, fixed_upstream, not_understood


def _wrap_gather(original: Any, hit: Hit) -> Any:
    def get_parameter_state_dp_zero(self: Any, *args: Any, **kwargs: Any) -> Any:
        hit()
        with canonical(self):
            return original(self, *args, **kwargs)

    return get_parameter_state_dp_zero


def _diagnose(module: ModuleType, original: Any) -> Diagnosis:
    reason = missing_parameters(original, "self")
    if reason:
        return not_understood(reason)
    if has_patch(original, "canonical-master"):
        return fixed_upstream("patch 0005-canonical-master is there")
    return NEEDED


FIX = Fix(
    id="canonical-master",
    faults=("F7",),
    summary="fully_reshardable holds float32 masters and moments, whatever the backend stores",
    targets=(
        Target(
            DISTRIBUTED,
            "DistributedOptimizer.get_parameter_state_dp_zero",
            _wrap_gather,
            _diagnose,
        ),
    ),
)

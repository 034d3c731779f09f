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

from typing import Any

from vime_optim.fixes.places import DISTRIBUTED_OPTIMIZER
from vime_optim.optimizer.record import canonical
from vime_optim.registry import Fix, Hit, unless_patched

FIX = Fix(
    id="canonical-master",
    faults=("F7",),
    summary="fully_reshardable holds float32 masters and moments, whatever the backend stores",
)


@FIX.wraps(DISTRIBUTED_OPTIMIZER, "get_parameter_state_dp_zero", unless_patched("canonical-master"))
def _gather(original: Any, hit: Hit, self: Any, *args: Any, **kwargs: Any) -> Any:
    hit()
    with canonical(self):
        return original(self, *args, **kwargs)

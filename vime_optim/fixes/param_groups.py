"""Saved param groups are paired by all that tells them apart, without DistributedOptimizer too.

Symptom: after a resume the maximum learning rate of one group is that of another (F24).
Cause: up to 0.18 groups are looked up by four multipliers and flags; of those that agree there, the
last wins.
Changes: the saved groups are matched by optimizer/matching; parameters stay as they were given.
Leaves alone: DistributedOptimizer, whose load_state_dict the `step` fix wraps.
Remove when: param_group_identifier_keys holds every key of a group.
"""

from __future__ import annotations

from typing import Any

from vime_optim.fixes.places import MEGATRON_OPTIMIZER
from vime_optim.optimizer.matching import identifiers, match_groups
from vime_optim.registry import Fix, Hit, takes

FIX = Fix(
    id="param-groups",
    faults=("F24",),
    summary="param groups that differ in one value alone keep it on a resume",
)


@FIX.wraps(
    MEGATRON_OPTIMIZER,
    "_filter_and_reorder_param_groups",
    takes("current_groups", "state_dict_groups"),
)
def _reorder(original: Any, hit: Hit, current_groups: Any, state_dict_groups: Any) -> Any:
    if len(current_groups) != len(state_dict_groups):
        return original(current_groups, state_dict_groups)
    hit()
    matched = match_groups(current_groups, state_dict_groups, identifiers())
    # Parameters are in the present order; only the values beside them were saved.
    return [
        {**found, "params": given["params"]}
        for found, given in zip(matched, state_dict_groups, strict=True)
    ]

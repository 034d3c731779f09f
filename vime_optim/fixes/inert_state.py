"""State of HybridDeviceOptimizer is made without random numbers and without moving a parameter.

Symptom: resume is not bitwise (F15).
Cause: before a load, state is made by a step on random gradients.
Changes: dummy_step() makes the state that a first step would find, all zero.
Leaves alone: state that is there already.
Remove when: dummy_step() draws no random numbers and updates nothing.
"""

from __future__ import annotations

from typing import Any

from vime_optim.fixes.places import HYBRID_OPTIMIZER, in_state_dict
from vime_optim.optimizer.fresh_state import ensure_hybrid_state, ensure_saveable
from vime_optim.optimizer.kinds import is_hybrid
from vime_optim.registry import Fix, Hit, unless_patched

FIX = Fix(
    id="inert-state",
    faults=("F15",),
    summary="state is made without random numbers and without moving a parameter",
    targets=(in_state_dict(),),
)


def make_state(dist_opt: Any, hit: Hit) -> None:
    """Of CPU offload that has none, before its state dict is asked for."""
    if is_hybrid(dist_opt.optimizer) and not dist_opt.optimizer.state:
        hit()
        ensure_saveable(dist_opt)


@FIX.wraps(HYBRID_OPTIMIZER, "dummy_step", unless_patched("inert-state"))
def _dummy_step(original: Any, hit: Hit, self: Any) -> None:
    """Replaced: stepping with random gradients is the fault itself."""
    hit()
    ensure_hybrid_state(self)

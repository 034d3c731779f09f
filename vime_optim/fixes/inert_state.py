"""State of HybridDeviceOptimizer is made without random numbers and without moving a parameter.

Symptom: resume is not bitwise (F15).
Cause: before a load, state is made by a step on random gradients.
Changes: dummy_step() makes the state that a first step would find, all zero.
Leaves alone: state that is there already.
Remove when: dummy_step() draws no random numbers and updates nothing.
"""

from __future__ import annotations

from typing import Any

from vime_optim.fixes.places import HYBRID
from vime_optim.optimizer.fresh_state import ensure_hybrid_state
from vime_optim.registry import Fix, Hit, Target, unless_patched


def _wrap_dummy_step(original: Any, hit: Hit) -> Any:
    """Replaced: stepping with random gradients is the fault itself."""

    def dummy_step(self: Any) -> None:
        hit()
        ensure_hybrid_state(self)

    return dummy_step


FIX = Fix(
    id="inert-state",
    faults=("F15",),
    summary="state is made without random numbers and without moving a parameter",
    targets=(
        Target(
            HYBRID,
            "HybridDeviceOptimizer.dummy_step",
            _wrap_dummy_step,
            unless_patched("inert-state"),
        ),
    ),
)

"""What stock megatron-core wrote wrongly beyond repair is refused.

Symptom: nothing is raised, and states of other parameters (F20, F26) or of other steps (F19) are
resumed.
Cause: the file holds them so, and does not say it.
Changes: state dicts of ours carry a mark; after a load without it, master parameters are compared
with the model's parameters, of which they are the exact values; remainders that were written in
place of masters (F7) are put together with the parameters again.
Leaves alone: files of ours; a model that was not loaded before its optimizer; quantized parameters.
Remove when: no checkpoint of a release with these faults is left.
"""

from __future__ import annotations

from typing import Any

from vime_optim.fixes.places import DISTRIBUTED_OPTIMIZER, in_state_dict
from vime_optim.optimizer.kinds import has_buffers
from vime_optim.optimizer.stock_state import MARK, check_unmarked
from vime_optim.registry import Fix, Hit, takes

FIX = Fix(
    id="foreign",
    faults=("F7", "F19", "F20", "F26"),
    summary="states that stock wrote wrongly beyond repair are refused",
    targets=(in_state_dict(),),
    after=("step",),
)


def mark(state: dict[str, Any]) -> None:
    """Say in an optimizer's state dict that each state is under its own name."""
    state["optimizer"][MARK] = True


@FIX.wraps(DISTRIBUTED_OPTIMIZER, "load_state_dict", takes("self", "state_dict"))
def _load_state_dict(original: Any, hit: Hit, self: Any, state_dict: Any) -> None:
    original(self, state_dict)
    if has_buffers(self) and "param_state" in state_dict:
        hit()
        if not state_dict["optimizer"].get(MARK):
            check_unmarked(self)

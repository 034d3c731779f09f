"""Host and float32 copies follow when a model is loaded without its optimizer.

Symptom: under CPU offload, the first step after loading a model throws its weights away (F12).
Cause: Megatron refreshes the float32 copies of 16-bit parameters alone, and all of them.
Changes: every copy follows its parameter, but for masters that belong to it already.
Leaves alone: parameters without a copy.
Remove when: update_fp32_param_by_new_param() serves host copies and keeps restored masters.
"""

from __future__ import annotations

from typing import Any

import torch

from vime_optim.fixes.places import HYBRID_OPTIMIZER
from vime_optim.optimizer.kinds import MASTER
from vime_optim.optimizer.refresh import is_trained, stays
from vime_optim.optimizer.slots import Slot
from vime_optim.registry import Fix, Hit, unless_patched

FIX = Fix(
    id="hybrid-refresh",
    faults=("F12",),
    summary="host and float32 copies follow when a model is loaded without its optimizer",
)


@FIX.wraps(HYBRID_OPTIMIZER, "update_fp32_param_by_new_param", unless_patched("fine-tune"))
@torch.no_grad()
def _refresh_masters(original: Any, hit: Hit, self: Any) -> None:
    """Replaced: Megatron's own would round masters that belong to their parameters."""
    hit()
    trained = is_trained(self)
    # Megatron refreshes the float32 copies of 16-bit parameters alone; the host copies of
    # float32 ones (every parameter without PAO) would be stepped from where they were.
    for param, held in self.param_to_inner_param.items():
        if held is not param and not stays(self, Slot(MASTER, held), param, trained):
            held.detach().copy_(param.detach())

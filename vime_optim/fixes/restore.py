"""Restored Adam state goes into the optimizer's own storage, value by value.

Symptom: a load dies on a `padding` marker (F6), or a missing `step` or `master_param` (F8); moments
stay views of all that was read (F10).
Cause: Megatron hands everything it finds to the optimizer, by reference for CPU offload.
Changes: `_set_main_param_and_optimizer_states` is replaced, since each of its branches is at fault:
each state that the optimizer has is looked up in what was loaded, checked, and copied in place.
Leaves alone: which states are loaded, and in what order.
Remove when: Megatron copies in place and ignores what is no state.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from vime_optim.errors import OptimizerStateError
from vime_optim.fixes.places import DISTRIBUTED_OPTIMIZER
from vime_optim.optimizer.kinds import MASTER, STATE_MASTER, param_name
from vime_optim.optimizer.restoring import write_slot
from vime_optim.optimizer.slots import slots_of
from vime_optim.probe import has_patch, missing_parameters
from vime_optim.registry import NEEDED, Diagnosis, Fix, Hit, Verdict, not_understood

_MASTER_NAMES = (MASTER, STATE_MASTER, "fp32_param")
"""Names of the master in Megatron's formats, the current one first."""


FIX = Fix(
    id="restore",
    faults=("F6", "F8", "F10"),
    summary="restored Adam state owns its storage and ignores what is no state",
)


@torch.no_grad()
def restore_states(dist_opt: Any, model_param: torch.Tensor, tensors: Mapping[str, Any]) -> None:
    """Copy loaded `tensors` (1-D shards, by state name) into the optimizer's own storage.

    Raises:
        OptimizerStateError: a state is missing or has another size than this rank's shard.
    """
    for name, slot in slots_of(dist_opt, model_param).items():
        value = _find(tensors, name)
        if not isinstance(value, torch.Tensor) or value.numel() != slot.numel:
            raise OptimizerStateError(
                "a loaded optimizer state does not fit its parameter",
                where=f"{name} of {param_name(dist_opt, model_param)}",
                got=tuple(value.shape) if isinstance(value, torch.Tensor) else "nothing",
                expected=f"{slot.numel} elements",
                next_step="check that the checkpoint is of this model and optimizer"
                " (`vime-optim inspect`)",
            )
        write_slot(dist_opt, slot, value.detach().reshape(-1))


def _find(tensors: Mapping[str, Any], name: str) -> Any:
    names = _MASTER_NAMES if name == MASTER else (name,)
    return next((tensors[n] for n in names if n in tensors), None)


def _diagnose(module: ModuleType, original: Any) -> Diagnosis:
    reason = missing_parameters(original, "self", "model_param", "tensors")
    if reason:
        return not_understood(reason)
    if has_patch(original, "step") and has_patch(module, "own-storage"):
        # What the patches end, they end; scaled states are set back to the bit here alone.
        return Diagnosis(Verdict.NEEDED, "patched; still needed for scaled states")
    return NEEDED


@FIX.wraps(DISTRIBUTED_OPTIMIZER, "_set_main_param_and_optimizer_states", _diagnose)
def _set_states(
    original: Any, hit: Hit, self: Any, model_param: torch.Tensor, tensors: dict[str, Any]
) -> None:
    hit()
    restore_states(self, model_param, tensors)

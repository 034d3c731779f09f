"""`step` never enters sharded param state and is restored from the param groups.

Symptom: a save or a load fails on `step` (F1, F2, F29); Adam goes on from another step (F3, F4,
F8); state is built twice more on load (F18); states are saved under another parameter's name where
a group holds float32 and 16-bit parameters (F20); groups that differ in max_lr alone get one of
both values (F24).
Cause: a counter is handled as if it were a state of the shape of its parameter.
Changes: param state holds tensors of the parameter's size alone; state_dict() and load_state_dict()
see the inner optimizer's groups without its tensors; the step is read from and written to wherever
the backend keeps it; saved groups are paired by all that tells them apart.
Leaves alone: Megatron-FSDP, stubs (see chained), the grad scaler.
Remove when: every supported megatron-core restores each backend's counter.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from vime_optim.errors import CheckpointError
from vime_optim.fixes.places import CHAINED_OPTIMIZER, DISTRIBUTED_OPTIMIZER, in_state_dict
from vime_optim.optimizer.fresh_state import ensure_saveable, ensure_state
from vime_optim.optimizer.groups_only import COUNTS, groups_only, saved_step, step_into_groups
from vime_optim.optimizer.kinds import (
    MASTER,
    correct_group_map,
    counts_steps,
    has_buffers,
    is_hybrid,
    is_native,
    is_precision_aware,
    is_transformer_engine,
    optimizer_param,
    owned_params,
    param_name,
    sub_optimizers,
)
from vime_optim.optimizer.matching import identifiers, match_groups
from vime_optim.optimizer.record import record_of
from vime_optim.optimizer.refresh import note_restored
from vime_optim.optimizer.restoring import sync_moved_params
from vime_optim.optimizer.slots import slots_of
from vime_optim.optimizer.steps import drop_steps, steps_as_numbers, write_step
from vime_optim.optimizer.stock_state import MARK
from vime_optim.probe import has_patch, missing_parameters, source_of
from vime_optim.registry import (
    NEEDED,
    Diagnose,
    Diagnosis,
    Fix,
    Hit,
    fixed_upstream,
    not_understood,
    takes,
)


def _diagnose(*needed: str) -> Diagnose:
    def diagnose(module: ModuleType, original: Any) -> Diagnosis:
        reason = missing_parameters(original, "self", *needed)
        if reason:
            return not_understood(reason)
        if not source_of(original):
            return not_understood("its source cannot be read")
        # State is read as float32 here for the gathering formats, which their own patch does too.
        if has_patch(original, "step") and has_patch(module, "canonical-master"):
            return fixed_upstream("patches 0001-step and 0005-canonical-master are there")
        return NEEDED

    return diagnose


FIX = Fix(
    id="step",
    faults=("F1", "F2", "F3", "F4", "F8", "F18", "F20", "F21", "F24", "F25", "F29"),
    summary="step is a counter: kept out of param state, restored from param groups",
    targets=(in_state_dict(_diagnose()),),
)


def state_with_steps(original: Any, dist_opt: Any, hit: Hit) -> dict[str, Any]:
    """The state dict of an optimizer: its groups with their step, without its tensors."""
    hit()
    ensure_saveable(dist_opt)
    with groups_only(dist_opt) as inner:
        state: dict[str, Any] = original(dist_opt)
    step_into_groups(inner, state["optimizer"]["param_groups"])
    if counts_steps(inner):
        state["optimizer"][COUNTS] = True
    return state


@FIX.wraps(DISTRIBUTED_OPTIMIZER, "load_state_dict", _diagnose("state_dict"))
def _load_state_dict(original: Any, hit: Hit, self: Any, state_dict: dict[str, Any]) -> None:
    if not has_buffers(self):
        original(self, state_dict)
        return
    hit()
    groups = match_groups(self.optimizer.param_groups, _groups_of(state_dict), identifiers())
    saved = state_dict["optimizer"]
    step = saved_step(groups)
    correct_group_map(self)
    ensure_state(self)
    counts = counts_steps(self.optimizer)
    if step is None and counts and (is_native(self.optimizer) or is_hybrid(self.optimizer)):
        step = 0  # saved before the first step
    with groups_only(self, groups):
        # Without Transformer Engine and Apex, Megatron asks every group for a step.
        original(self, _with_groups(state_dict, groups, step or 0))
    if counts and not step and "param_state" in state_dict:
        if not saved.get(MARK) or (step is None and saved.get(COUNTS)):
            _require_no_moments(self)  # not said to have none by a save of ours
        if step is None and any("step" in group for group in self.optimizer.param_groups):
            step = 0  # FusedAdam's counters of before the load are those of other moments
    if step is not None:
        write_step(self.optimizer, step)
    elif not counts:
        for part in sub_optimizers(self.optimizer):
            drop_steps(part)
    if "param_state" in state_dict:
        sync_moved_params(self)
        note_restored(self)


def _groups_of(state_dict: dict[str, Any]) -> list[dict[str, Any]]:
    try:
        groups: list[dict[str, Any]] = state_dict["optimizer"]["param_groups"]
    except (KeyError, TypeError):
        raise CheckpointError(
            "the optimizer's part of the checkpoint has no param groups",
            got=f"keys {sorted(map(str, state_dict))}",
            expected="state_dict['optimizer']['param_groups']",
            next_step="inspect the checkpoint with `vime-optim inspect`",
        ) from None
    return groups


def _with_groups(
    state_dict: dict[str, Any], groups: list[dict[str, Any]], step: int
) -> dict[str, Any]:
    """The state dict with these groups, and the same step in each, as Megatron asserts for Adam."""
    groups = [{**group, "step": step} for group in groups]
    return {**state_dict, "optimizer": {**state_dict["optimizer"], "param_groups": groups}}


def _require_no_moments(dist_opt: Any) -> None:
    """A checkpoint of stock without a step was written before the first one: no moment counts."""
    for model_param, _ in owned_params(dist_opt):
        for name, slot in slots_of(dist_opt, model_param).items():
            if name != MASTER and bool(slot.tensor.count_nonzero()):
                raise CheckpointError(
                    "the checkpoint holds moments and no step counter: the counter is lost",
                    where=f"{name} of {param_name(dist_opt, model_param)}",
                    got="no step in any param group",
                    expected="a step, as only a checkpoint of before the first step has none",
                    next_step="load another checkpoint, or the model without the optimizer",
                )


@FIX.wraps(DISTRIBUTED_OPTIMIZER, "_get_main_param_and_optimizer_states", _diagnose("model_param"))
def _get_states(
    original: Any, hit: Hit, self: Any, model_param: torch.Tensor
) -> dict[str, torch.Tensor]:
    hit()
    param = optimizer_param(self, model_param)  # first: Megatron's own map may be wrong
    if record_of(self).is_canonical:
        return {name: slot.read() for name, slot in slots_of(self, model_param).items()}
    tensors = {
        name: value
        for name, value in original(self, model_param).items()
        if name != "step" and isinstance(value, torch.Tensor)
    }
    if param.dtype == torch.float32 and _is_fused_master(self):
        # FusedAdam updates a float32 parameter itself; its master_param is stale.
        tensors["param"] = param
    return tensors


@FIX.wraps(CHAINED_OPTIMIZER, "_synchronize_steps", takes("self"), optional=True)
def _synchronize_steps(original: Any, hit: Hit, self: Any) -> Any:
    inners = (getattr(member, "optimizer", None) for member in self.chained_optimizers)
    groups = [group for inner in inners if inner is not None for group in inner.param_groups]
    hit()
    with steps_as_numbers(groups):
        return original(self)


def _is_fused_master(dist_opt: Any) -> bool:
    return is_precision_aware(dist_opt) and is_transformer_engine(dist_opt.optimizer)

"""A save is of a format that can hold it, and that its reader takes.

Symptom: fully_reshardable fails in planning where some of the layers that share a key are frozen;
local checkpoints refuse it; a checkpoint whose rank 0 has no optimizer does not say its type.
Cause: a tensor of which a part has no state cannot be described; a local checkpoint holds a rank's
own shards; rank 0 alone writes what a checkpoint says of itself.
Changes: before anything is written save() learns from one number a rank whether the tensors are
whole; where not, all ranks save dp_reshardable with a warning, or raise (VIME_OPTIM_SHARDING).
Local checkpoints keep the type that was asked for. The type that was saved is recorded by all.
Leaves alone: what the format can describe.
Remove when: Megatron describes tensors of which a part is missing.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

from vime_optim import log, settings
from vime_optim.commit import agreement
from vime_optim.errors import OptimizerStateError, PlanError, WriterError
from vime_optim.fixes.places import DIST_CHECKPOINTING, TRAINING, in_save
from vime_optim.fixes.sharding import (
    DP,
    FULLY,
    TYPE_KEY,
    FoundState,
    fitting,
    keeping_the_type,
    optimizer_states,
    recorded_types,
    settle_type,
)
from vime_optim.optimizer.record import record_of
from vime_optim.probe import bind
from vime_optim.registry import Call, Fix, Hit, takes
from vime_optim.state_dicts import replaced

if TYPE_CHECKING:
    from vime_optim.reshard.engine import ParamState

_LOCAL = f"{DIST_CHECKPOINTING}.tensor_aware_state_dict:MCoreTensorAwareStateDict"
_NOT_BUILT = "the state to save was not built, as a rank failed"


FIX = Fix(
    id="formats",
    faults=("F16",),
    summary="a save is of a format that can describe it, and that its reader takes",
    targets=(in_save("sharded_state_dict", "checkpoint_dir", "content_metadata"),),
)


def settle_format(call: Call, hit: Hit) -> None:
    """Collective: the state dict and the content metadata of the type that is saved."""
    hit()
    operation = agreement.current()
    if operation is not None:
        _settle(call, operation)
        return
    operation = agreement.Operation(_NOT_BUILT, str(call["checkpoint_dir"]), WriterError)
    with agreement.together(operation):
        _settle(call, operation)


def _settle(call: Call, operation: agreement.Operation) -> None:
    from vime_optim.reshard.complete import incomplete_tensor, missing_weight
    from vime_optim.reshard.engine import param_states

    state = call["sharded_state_dict"]
    found = list(optimizer_states(state))
    params = [each for each in param_states(state) if not each.is_loading]
    plans = [each.plan for each in params]
    types = list(recorded_types(state))
    votes = (missing_weight(plans), types.count(FULLY), types.count(DP))
    missing, fully, dp = operation.check(values=votes)
    saved = FULLY if fully else DP if dp else None
    if missing and fully:
        error = incomplete_tensor(plans)
        if error is not None:
            call["sharded_state_dict"] = _other_format(state, found, params, error)
            operation.check()
            saved = DP
    content = call.get("content_metadata")
    if content is None and types:
        return  # the state says it; one more key would be one more member of a plain chain
    if saved is not None and (content or {}).get(TYPE_KEY) != saved:
        call["content_metadata"] = {**(content or {}), TYPE_KEY: saved}


def _other_format(
    state: dict[Any, Any], found: list[FoundState], params: list[ParamState], error: PlanError
) -> dict[Any, Any]:
    """The state dict with dp_reshardable instead of fully_reshardable.

    Raises:
        OptimizerStateError: the settings want no other type than the one that was asked for.
        PlanError: the caller took the optimizer's state apart, so that it cannot be built anew.
    """
    from vime_optim.reshard.engine import param_states

    policy = settings.current().sharding
    if policy != "enforce":
        raise OptimizerStateError(
            "the optimizer cannot be saved as fully_reshardable: some of the layers that share a"
            " tensor have no optimizer state",
            where=error.where,
            got=f"VIME_OPTIM_SHARDING={policy}",
            expected="layers that are all trained or all frozen",
            next_step="save it as dp_reshardable, which VIME_OPTIM_SHARDING=enforce does by itself",
        )
    inside = 0
    for path, each in found:
        if each.sharding_type == FULLY:
            inside += len(list(param_states(each)))
            record_of(each.owner).cannot_be_fully = True
            state = replaced(state, path, each.rebuild(DP, False))
    if inside < len(params):
        raise error
    log.say(
        logging.WARNING,
        f"vime_optim: saving the optimizer as dp_reshardable, not fully_reshardable: {error.where}."
        " It can be resumed with any number of data-parallel ranks, but with this tensor and"
        " pipeline parallel layout alone",
    )
    return state


@FIX.wraps(TRAINING, "save_checkpoint", takes("non_persistent_ckpt"), optional=True)
def _save_checkpoint(original: Any, hit: Hit, *args: Any, **kwargs: Any) -> Any:
    """Local checkpoints of Megatron-LM: dp_reshardable from the start, log line included."""
    bound = bind(original, *args, **kwargs)
    if not bound.get("non_persistent_ckpt") or not _is_local(original):
        return original(*args, **kwargs)
    hit()
    with keeping_the_type():
        return original(*args, **kwargs)


def _is_local(function: Any) -> bool:
    get_args = getattr(sys.modules[function.__module__], "get_args", None)
    return get_args is not None and get_args().non_persistent_ckpt_type == "local"


@FIX.wraps(_LOCAL, "from_state_dict", takes("sharded_state_dict"), optional=True)
def _from_state_dict(
    original: Any, hit: Hit, cls: Any, sharded_state_dict: Any, *args: Any, **kwargs: Any
) -> Any:
    """What becomes a local checkpoint, whoever asks for it."""
    operation = agreement.Operation(
        "the local checkpoint was not made, as a rank failed", "a local checkpoint", WriterError
    )
    with agreement.together(operation):
        for path, each in list(optimizer_states(sharded_state_dict)):
            if each.sharding_type == FULLY != each.requested:
                hit()
                with keeping_the_type():
                    built = each.rebuild(settle_type(None, each.requested, False), False)
                sharded_state_dict = replaced(sharded_state_dict, path, built)
        made = original(cls, sharded_state_dict, *args, **kwargs)
        operation.check()
    return made


@FIX.wraps(_LOCAL, "to_state_dict", takes("sharded_state_dict"), optional=True)
def _to_state_dict(
    original: Any, hit: Hit, self: Any, sharded_state_dict: Any, *args: Any, **kwargs: Any
) -> Any:
    found = list(optimizer_states(sharded_state_dict))
    if found:
        hit()
        saved = next(recorded_types(self.common), None)
        sharded_state_dict = fitting(sharded_state_dict, found, saved)
    return original(self, sharded_state_dict, *args, **kwargs)

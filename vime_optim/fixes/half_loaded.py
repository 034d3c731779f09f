"""A half-loaded optimizer is neither stepped nor saved.

Symptom: after a load that failed in the middle, or whose result was thrown away, training goes on
with moments of one run and parameters of another, and saves them.
Cause: the checkpoint is read into the optimizer's own tensors.
Changes: from the first byte read until load_state_dict() has taken all, step and save raise.
Leaves alone: loads that were refused before anything was read.
Remove when: never; reading in place is what makes loading cheap.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from vime_optim.commit import agreement, loading
from vime_optim.fixes.places import (
    CHAINED_OPTIMIZER,
    DISTRIBUTED_OPTIMIZER,
    FLOAT16_OPTIMIZER,
    FP32_OPTIMIZER,
    LOAD_PLANNER,
    MIXED_PRECISION_OPTIMIZER,
    in_load,
)
from vime_optim.probe import bind
from vime_optim.registry import Call, Fix, Hit, takes

FIX = Fix(
    id="half-loaded",
    faults=("F14",),
    summary="an optimizer that a load left half done is neither stepped nor saved",
    targets=(in_load("sharded_state_dict", "checkpoint_dir"),),
    after=("writer-async", "writer-commit", "sharding", "stub"),
)


def until_taken(call: Call, operation: agreement.Operation | None) -> AbstractContextManager[None]:
    """Around a load: from when the reading begins, its optimizers count as half loaded."""
    return loading.into(call["sharded_state_dict"], str(call["checkpoint_dir"]), operation)


@FIX.wraps(DISTRIBUTED_OPTIMIZER, "step_with_ready_grads")
@FIX.wraps(MIXED_PRECISION_OPTIMIZER, "step_with_ready_grads")
@FIX.wraps(FP32_OPTIMIZER, "step_with_ready_grads")
def _step(original: Any, hit: Hit, self: Any, *args: Any, **kwargs: Any) -> Any:
    loading.require_whole(self, "stepped")
    return original(self, *args, **kwargs)


@FIX.wraps(DISTRIBUTED_OPTIMIZER, "sharded_state_dict", takes("is_loading"))
@FIX.wraps(FLOAT16_OPTIMIZER, "sharded_state_dict", takes("is_loading"))
@FIX.wraps(FP32_OPTIMIZER, "sharded_state_dict", takes("is_loading"))
@FIX.wraps(CHAINED_OPTIMIZER, "sharded_state_dict", takes("is_loading"))
def _sharded_state_dict(original: Any, hit: Hit, self: Any, *args: Any, **kwargs: Any) -> Any:
    if not bind(original, self, *args, **kwargs).get("is_loading"):
        loading.require_whole(self, "saved")
    return original(self, *args, **kwargs)


@FIX.wraps(DISTRIBUTED_OPTIMIZER, "load_state_dict")
@FIX.wraps(FLOAT16_OPTIMIZER, "load_state_dict")
@FIX.wraps(FP32_OPTIMIZER, "load_state_dict")
def _load_state_dict(original: Any, hit: Hit, self: Any, state_dict: Any) -> Any:
    result = original(self, state_dict)
    # DistributedOptimizer calls it without param state too, to make its own.
    if not hasattr(self, "gbuf_ranges") or "param_state" in state_dict:
        hit()
        loading.taken(self)
    return result


@FIX.wraps(LOAD_PLANNER, "finish_plan")
def _finish_plan(original: Any, hit: Hit, self: Any, *args: Any, **kwargs: Any) -> Any:
    plan = original(self, *args, **kwargs)
    if any(item.type.name == "TENSOR" for item in plan.items):
        loading.reading_begins()
    return plan

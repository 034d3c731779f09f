"""A half-loaded optimizer is neither stepped nor saved.

Symptom: after a load that failed in the middle, or whose result was thrown away, training goes on
with moments of one run and parameters of another, and saves them.
Cause: the checkpoint is read into the optimizer's own tensors.
Changes: from the first byte read until load_state_dict() has taken all, step and save raise.
Leaves alone: loads that were refused before anything was read.
Remove when: never; reading in place is what makes loading cheap.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

from vime_optim.commit import agreement, loading
from vime_optim.fixes.places import DISTRIBUTED, LOAD, OPTIMIZER, SERIALIZATION, TORCH_STRATEGY
from vime_optim.registry import Call, Fix, Hit, Target, takes

_CLASSES = (
    (DISTRIBUTED, "DistributedOptimizer"),
    (OPTIMIZER, "MixedPrecisionOptimizer"),
    (OPTIMIZER, "Float16OptimizerWithFloat16Params"),
    (OPTIMIZER, "FP32Optimizer"),
)


def until_taken(call: Call, operation: agreement.Operation | None) -> AbstractContextManager[None]:
    """Around a load: from when the reading begins, its optimizers count as half loaded."""
    return loading.into(call["sharded_state_dict"], str(call["checkpoint_dir"]), operation)


def _wrap_step(original: Any, hit: Hit) -> Any:
    @functools.wraps(original)
    def step_with_ready_grads(self: Any, *args: Any, **kwargs: Any) -> Any:
        loading.require_whole(self, "stepped")
        return original(self, *args, **kwargs)

    return step_with_ready_grads


def _wrap_state(original: Any, hit: Hit) -> Any:
    @functools.wraps(original)
    def sharded_state_dict(
        self: Any, model_sharded_state_dict: Any, is_loading: bool = False, *args: Any, **kw: Any
    ) -> Any:
        if not is_loading:
            loading.require_whole(self, "saved")
        return original(self, model_sharded_state_dict, is_loading, *args, **kw)

    return sharded_state_dict


def _wrap_load_state_dict(original: Any, hit: Hit) -> Any:
    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> Any:
        result = original(self, state_dict)
        # DistributedOptimizer calls it without param state too, to make its own.
        if not hasattr(self, "gbuf_ranges") or "param_state" in state_dict:
            hit()
            loading.taken(self)
        return result

    return load_state_dict


def _wrap_finish_plan(original: Any, hit: Hit) -> Any:
    def finish_plan(self: Any, *args: Any, **kwargs: Any) -> Any:
        plan = original(self, *args, **kwargs)
        if any(item.type.name == "TENSOR" for item in plan.items):
            loading.reading_begins()
        return plan

    return finish_plan


FIX = Fix(
    id="half-loaded",
    faults=("F14",),
    summary="an optimizer that a load left half done is neither stepped nor saved",
    targets=(
        Target(SERIALIZATION, "load", LOAD, takes("sharded_state_dict", "checkpoint_dir")),
        *(
            Target(module, f"{name}.step_with_ready_grads", _wrap_step)
            for module, name in _CLASSES
            if name != "Float16OptimizerWithFloat16Params"
        ),
        *(
            Target(module, f"{name}.load_state_dict", _wrap_load_state_dict)
            for module, name in _CLASSES
            if name != "MixedPrecisionOptimizer"
        ),
        *(
            Target(module, f"{name}.sharded_state_dict", _wrap_state, takes("is_loading"))
            for module, name in (
                *_CLASSES,
                (OPTIMIZER, "ChainedOptimizer"),
            )
            if name != "MixedPrecisionOptimizer"
        ),
        Target(
            TORCH_STRATEGY,
            "MCoreLoadPlanner.finish_plan",
            _wrap_finish_plan,
        ),
    ),
    after=("writer-async", "writer-commit", "sharding", "stub"),
)

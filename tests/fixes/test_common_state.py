"""What is dropped from a loaded common state, and what must never be."""

from __future__ import annotations

import pytest

from tests.cases import Case
from tests.phases import Phases
from vime_optim.errors import CheckpointError
from vime_optim.files.stand_ins import inert_class
from vime_optim.fixes.common_state import mend_common_state
from vime_optim.optimizer.groups_only import saved_step

CLASS = inert_class("torch.optim.adamw.AdamW")


def test_stray_steps_and_classes_go_and_the_rest_stays() -> None:
    state = {
        "iteration": 3,
        "optimizer": {
            "param_state_sharding_type": "dp_reshardable",
            "param_state": {0: {"bf16": [[{"step": [1.0, 1.0], "padding": False}]]}},
            "optimizer": {"param_groups": [{"lr": 0.5, "step": 3, "cls": CLASS}]},
        },
    }
    removed = mend_common_state(state)
    assert len(removed) == 2
    assert state == {
        "iteration": 3,
        "optimizer": {
            "param_state_sharding_type": "dp_reshardable",
            "optimizer": {"param_groups": [{"lr": 0.5, "step": 3}]},
        },
    }


def test_param_state_that_is_no_step_is_never_dropped() -> None:
    """A moment in the common state would be lost with it."""
    state = {
        "param_state_sharding_type": "dp_reshardable",
        "param_state": {0: {"bf16": [[{"step": 1.0, "exp_avg": [0.25]}]]}},
    }
    with pytest.raises(CheckpointError, match="param state that is no step") as caught:
        mend_common_state(state)
    assert "exp_avg" in str(caught.value.where)
    assert "param_state" in state


def test_a_class_outside_of_param_groups_is_refused() -> None:
    with pytest.raises(CheckpointError, match="names a class"):
        mend_common_state({"iteration": 3, "args": {"cls": CLASS}})


def test_the_highest_recorded_step_is_the_truth() -> None:
    """FusedAdam of older releases does not advance groups that are empty on a rank."""
    assert saved_step([{"step": 0}, {"lr": 1.0}, {"step": 3}, {"step": None}, {"step": 2}]) == 3
    assert saved_step([{"lr": 1.0}, {"step": None}]) is None
    assert saved_step([]) is None


@pytest.mark.parametrize("release", ["0.16.1", pytest.param("0.19.2", marks=pytest.mark.matrix)])
def test_a_load_leaves_allowed_what_was_allowed(release: str, phases: Phases) -> None:
    """The second load of a process found Megatron's own classes refused: the reading of objects
    had taken them from torch's list."""
    case = Case.parse(f"{release},hybrid,dp=1")
    phases.run("tests.fixes.again_job:save_arguments", case)
    (rank,) = phases.run("tests.fixes.again_job:load_twice", case, loading=True)
    assert rank["found"] == [0.5, 0.5]
    assert rank["had"] > 10
    assert rank["lost"] == []

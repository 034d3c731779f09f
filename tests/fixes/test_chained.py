"""Checkpoints of another number of chained optimizers, and the steps of their groups (F21)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cases import Case
from tests.phases import Phases
from vime_optim.fixes.chained import _counting_parts, _fill_steps, fit_chain
from vime_optim.optimizer.groups_only import COUNTS


def group(step: int | None = None, **own: Any) -> dict[str, Any]:
    made = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    made |= {"lr": 0.1, **own}
    return made if step is None else {**made, "step": step}


class Member:
    def __init__(self, *groups: dict[str, Any]) -> None:
        self.optimizer = torch.optim.AdamW(
            [{**own, "params": [torch.nn.Parameter(torch.zeros(2))]} for own in groups]
        )


DENSE, EXPERTS = group(), group(is_expert_parallel=True)


def groups_in(state: dict[Any, Any]) -> list[list[tuple[bool, int]]]:
    lists = [entry["optimizer"]["param_groups"] for entry in state.values()]
    return [[(g["is_expert_parallel"], g["step"]) for g in groups] for groups in lists]


def test_a_state_of_the_chains_own_shape_is_passed_on_as_it_is() -> None:
    both = {n: {"optimizer": {"param_groups": [DENSE]}} for n in (0, 1)}
    assert fit_chain([Member(DENSE), Member(EXPERTS)], both) is both
    assert fit_chain([Member(DENSE)], both[0]) is both[0]


def test_one_that_was_saved_is_given_to_two_and_two_to_one() -> None:
    one = {"optimizer": {"param_groups": [group(3), group(4, is_expert_parallel=True)]}}
    two = fit_chain([Member(DENSE), Member(EXPERTS)], one)
    assert groups_in(two) == [[(False, 3)], [(True, 4)]]
    back = fit_chain([Member(DENSE, EXPERTS)], two)
    assert groups_in({0: back}) == [[(False, 3), (True, 4)]]


def test_experts_that_were_not_saved_take_the_dense_groups_step() -> None:
    one = {"optimizer": {"param_groups": [group(3)]}}
    made = fit_chain([Member(DENSE), Member(EXPERTS)], one)
    assert [step for groups in groups_in(made) for _, step in groups] == [3, 3]


def test_groups_without_a_step_take_that_of_the_others() -> None:
    counting = {COUNTS: True, "param_groups": [group(5), group()]}
    others = {"param_groups": [group()]}
    state = {
        "optimizer": {0: counting, 1: {"optimizer": {COUNTS: True, "param_groups": [group()]}}}
    }
    state["muon"] = others
    _fill_steps([part["param_groups"] for _, part in _counting_parts(state)])
    assert [g["step"] for g in counting["param_groups"]] == [5, 5]
    assert state["optimizer"][1]["optimizer"]["param_groups"][0]["step"] == 5
    assert "step" not in others["param_groups"][0], "an optimizer that counts no steps"


@pytest.mark.parametrize(
    ("words", "none"),
    [
        ("0.19.2,fused,pao,dp=2,moe,ep=2", None),
        ("0.16.1,torch,dp=2,moe,ep=2", 0),
        pytest.param("0.19.2,fused,pao,dp=2,pp=2,moe,ep=2,moe-on=last", None, marks=pytest.mark.ci),
    ],
)
def test_one_that_was_saved_without_a_step_is_loaded_without(
    words: str, none: int | None, phases: Phases
) -> None:
    """Its moments are kept, and neither the other's step nor its own of before the load."""
    case = Case.parse(words)
    for phase in ("save", "resume"):
        answers = phases.run(f"tests.fixes.no_step_job:{phase}", case)
        assert [answer["steps"] for answer in answers] == [[2, none]] * len(answers)
    assert phases.differences("after_save", "resumed") == []

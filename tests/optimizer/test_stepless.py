"""Optimizers that count no steps (Lion, SGD): exact, and nothing in their groups that they lack."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cases import Case
from tests.phases import Phases
from vime_optim.optimizer.groups_only import step_into_groups


@pytest.mark.parametrize(
    ("words", "optimizer", "momentum"),
    [
        ("0.19.2,torch,dp=2", "lion", 0.0),
        ("0.19.2,fused,nopao,dp=2,dp_reshardable", "lion", 0.0),
        pytest.param("0.19.2,fused,nopao,dp=3", "lion", 0.0, marks=pytest.mark.matrix),
        pytest.param("0.19.2,torch,dp=2,dp_reshardable", "lion", 0.0, marks=pytest.mark.matrix),
        ("0.19.2,hybrid,pao,f=0.5,torchonly,dp=2", "sgd", 0.9),
        ("0.19.2,hybrid,pao,f=0.5,torchonly,dp=2", "sgd", 0.0),
        pytest.param(
            "0.16.1,hybrid,pao,f=1.0,torchonly,dp=2", "sgd", 0.9, marks=pytest.mark.matrix
        ),
    ],
)
def test_a_resume_is_exact_and_adds_no_step(
    words: str, optimizer: str, momentum: float, phases: Phases
) -> None:
    case = Case.parse(words)
    groups: dict[str, Any] = {}
    for phase in ("save", "resume"):
        target = f"tests.optimizer.stepless_job:{phase}"
        answers = phases.run(target, case, optimizer=optimizer, momentum=momentum)
        groups[phase] = [answer["groups"] for answer in answers]
    assert phases.differences("after_save", "resumed") == []
    assert groups["save"] == groups["resume"]
    assert "step" not in str(groups["save"])


def test_saved_groups_record_a_step_only_where_one_is_counted() -> None:
    """Megatron puts a 0 into groups of an optimizer whose states have no step."""
    weight = torch.nn.Parameter(torch.ones(2))
    groups: list[dict[str, Any]] = [{"lr": 0.1, "step": 0}]
    step_into_groups(torch.optim.SGD([weight], lr=0.1), groups)
    assert groups == [{"lr": 0.1}]
    adam = torch.optim.Adam([weight])
    weight.grad = torch.ones(2)
    adam.step()
    adam.step()
    step_into_groups(adam, groups)
    assert groups == [{"lr": 0.1, "step": 2}]

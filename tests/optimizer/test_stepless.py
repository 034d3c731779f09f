"""Optimizers that count no steps (Lion, SGD): exact, and nothing in their groups that they lack."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases import Case
from tests.phases import Phases


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

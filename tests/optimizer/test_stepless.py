"""Optimizers that count no steps (Lion, SGD): exact, and nothing in their groups that they lack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cases import Case
from tests.conftest import LauncherPool
from vime_optim.verify.compare import compare, load_state


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
    words: str, optimizer: str, momentum: float, launchers: LauncherPool, tmp_path: Path
) -> None:
    case = Case.parse(words)
    payload = {
        "case": case.to_dict(),
        "directory": str(tmp_path / "checkpoint"),
        "captures": str(tmp_path / "captures"),
        "step": case.num_steps,
        "optimizer": optimizer,
        "momentum": momentum,
    }
    groups: dict[str, Any] = {}
    for phase in ("save", "resume"):
        answers = launchers.get(case.megatron).run(
            f"tests.optimizer.stepless_job:{phase}",
            world_size=case.layout.world_size,
            payload=payload,
            out=tmp_path / phase,
        )
        groups[phase] = [answer["groups"] for answer in answers]
    captures = tmp_path / "captures"
    assert compare(load_state(captures / "after_save"), load_state(captures / "resumed")) == []
    assert groups["save"] == groups["resume"]
    assert "step" not in str(groups["save"])

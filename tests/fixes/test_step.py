"""A save before the first step (F25), through the real megatron-core."""

from __future__ import annotations

import pytest

from tests.cases import Case
from tests.phases import Phases


@pytest.mark.parametrize(
    "words",
    [
        "hybrid,pao,f=0.5,dp=2",
        "hybrid,pao,f=0.5,torchonly,dp=2,fp32norm",
        pytest.param("fused,pao,dp=2", marks=pytest.mark.matrix),
        pytest.param("torch,dp=2,dp_reshardable", marks=pytest.mark.matrix),
    ],
)
def test_a_save_before_the_first_step_resumes_exactly(words: str, phases: Phases) -> None:
    case = Case.parse(f"0.16.1,{words}")
    for phase in ("save", "resume"):
        phases.run(f"tests.fixes.fresh_job:{phase}", case)
    assert phases.differences("after_save", "resumed") == []

"""Masters that were restored outlive a refresh from the parameters; other weights do not."""

from __future__ import annotations

import pytest

from tests.cases import Case
from tests.phases import Phases

matrix = pytest.mark.matrix


@pytest.mark.parametrize(
    "words",
    [
        "0.16.1,hybrid,pao,f=0.5,dp=2",
        "0.16.1,hybrid,nopao,f=0.5,torchonly,dp=2",
        "0.16.1,fused,pao,dp=2",
        "0.16.1,torch,dp=2",
        pytest.param("0.19.2,hybrid,pao,f=0.5,torchonly,dp=2", marks=matrix),
        pytest.param("0.19.2,hybrid,pao,f=1.0,dp=2,dp_reshardable", marks=matrix),
        pytest.param("0.15.3,hybrid,pao,f=0.5,dp=2", marks=matrix),
        pytest.param("0.19.2,fused,pao,dp=2", marks=matrix),
        pytest.param("0.16.1,fused,nopao,dp=2", marks=matrix),
    ],
)
def test_a_refresh_after_a_load_keeps_masters(words: str, phases: Phases) -> None:
    case = Case.parse(words)
    phases.run("vime_optim.verify.job:save", case)
    answers = phases.run("tests.optimizer.refresh_job:resume", case)
    assert phases.differences("after_save", "resumed") == []
    ways = {"reload_model_params"}
    if "hybrid" in words:
        ways |= {"Megatron-Bridge", "NeMo-RL"}
    for answer in answers:
        assert answer["moved"] == {way: [] for way in ways}
        assert answer["stale"] == {way: [] for way in ways}
        assert ("hybrid" in words) == bool(answer["hits"]["framework-refresh"])

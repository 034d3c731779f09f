"""check_optimizer on restored optimizers of the real megatron-core."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases import Case
from tests.conftest import LauncherPool
from vime_optim.verify.runner import CaseRun


@pytest.mark.parametrize(
    "words",
    [
        "hybrid,pao,f=0.5,dp=2",
        "fused,pao,dp=2",
        pytest.param("hybrid,nopao,f=1,dp=2,dp_reshardable", marks=pytest.mark.matrix),
        pytest.param("torch,dp=2", marks=pytest.mark.matrix),
    ],
)
def test_a_restored_optimizer_is_sound_and_faults_are_named(
    words: str, launchers: LauncherPool, tmp_path: Path
) -> None:
    case = Case.parse(f"0.16.1,{words}")
    launcher = launchers.get(case.megatron)
    run = CaseRun(launcher, case, tmp_path)
    run.save(separate_continuous=False)
    payload = {
        "case": case.to_dict(),
        "directory": str(tmp_path),
        "captures": str(run.place.captures),
        "step": case.num_steps,
    }
    answers = launcher.run(
        "tests.optimizer.soundness_job:check", world_size=2, payload=payload, out=tmp_path / "check"
    )
    for answer in answers:
        assert answer["sound"] == ""
        assert "share one storage" in answer["aliased"]
        assert "exp_avg" in answer["aliased"]
        assert "holds more memory" in answer["oversized"]
        assert answer["mended"] == ""

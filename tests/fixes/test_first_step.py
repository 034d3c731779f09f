"""A save before the first step (F25), through the real megatron-core."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases import Case
from tests.conftest import LauncherPool
from vime_optim.verify.compare import compare, load_state


@pytest.mark.parametrize(
    "words",
    [
        "hybrid,pao,f=0.5,dp=2",
        "hybrid,pao,f=0.5,torchonly,dp=2,fp32norm",
        pytest.param("fused,pao,dp=2", marks=pytest.mark.matrix),
        pytest.param("torch,dp=2,dp_reshardable", marks=pytest.mark.matrix),
    ],
)
def test_a_save_before_the_first_step_resumes_exactly(
    words: str, launchers: LauncherPool, tmp_path: Path
) -> None:
    case = Case.parse(f"0.16.1,{words}")
    payload = {
        "case": case.to_dict(),
        "directory": str(tmp_path / "checkpoint"),
        "captures": str(tmp_path / "captures"),
        "step": 0,
    }
    for phase in ("save", "resume"):
        launchers.get(case.megatron).run(
            f"tests.fixes.fresh_job:{phase}", world_size=2, payload=payload, out=tmp_path / phase
        )
    captures = tmp_path / "captures"
    assert compare(load_state(captures / "after_save"), load_state(captures / "resumed")) == []

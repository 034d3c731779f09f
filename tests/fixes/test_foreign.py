"""Files of stock are loaded right, or refused (F7, F20, F26)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases import Case
from tests.conftest import LauncherPool
from vime_optim.errors import VerifyError
from vime_optim.tools.megatron_source import RELEASES
from vime_optim.verify.runner import CaseRun

#: Saved by stock: what a load of ours must say, or that it is exact.
FILES = (
    ("fused,nopao,dp=2->1,fp32norm,noqk,1bucket", "not those of its model"),
    ("fused,pao,dp=2,1bucket,load:hybrid,load:f=0.5", "exact"),
    ("fused,nopao,dp=2,fp32norm,noqk,1bucket", "not those of its model"),
    ("fused,nopao,dp=2,fp32norm,noqk,1bucket,dp_reshardable", "not those of its model"),
    ("fused,nopao,dp=2", "not those of its model"),
    ("fused,pao,dp=2", "shifts behind padding"),
    ("fused,pao,dp=2,1bucket", "exact"),
    ("fused,nopao,dp=2,1bucket", "exact"),
    ("fused,nopao,dp=2,groups=max_lr,1bucket", "exact"),
    ("hybrid,pao,f=0.5,dp=2,pp=2,moe,ep=2,moe-on=last,1bucket", "exact"),
)


@pytest.mark.parametrize(
    ("release", "words", "answer"),
    [
        pytest.param(
            r,
            words,
            answer,
            id=f"{r}-{words}",
            marks=() if r == "0.16.1" and (words, answer) in FILES[:1] else pytest.mark.matrix,
        )
        for r in RELEASES
        for words, answer in FILES
    ],
)
def test_a_file_of_stock_is_loaded_right_or_refused(
    release: str, words: str, answer: str, launchers: LauncherPool, tmp_path: Path
) -> None:
    case = Case.parse(words, megatron=release)
    launcher = launchers.get(release)
    CaseRun(launcher, case.replace(install=False), tmp_path).save(separate_continuous=False)
    resumed = CaseRun(launcher, case, tmp_path)
    try:
        resumed.load(case.num_steps)
    except VerifyError as error:
        resumed.record(error)
    outcome = resumed.outcome
    if answer == "exact":
        assert outcome.exact, "\n".join([outcome.summary(), *outcome.differences[:20]])
        assert outcome.sound, outcome.summary()
    else:
        assert outcome.error_type == "CheckpointError", outcome.summary()
        assert answer in (outcome.error or "")


@pytest.mark.matrix
def test_a_file_in_which_a_resume_made_groups_alike_is_refused(
    launchers: LauncherPool, tmp_path: Path
) -> None:
    """F24: the stock resume's own save holds one max_lr for both groups."""
    case = Case.parse("0.16.1,fused,nopao,dp=2,groups=max_lr,dp_reshardable,more=0")
    payload = {"case": case.replace(install=False).to_dict(), "step": 3}
    launcher = launchers.get(case.megatron)
    first = CaseRun(launcher, case.replace(install=False), tmp_path / "first")
    first.save(separate_continuous=False)
    payload |= {"directory": str(tmp_path / "first"), "captures": str(tmp_path / "captures")}
    payload["again"] = str(tmp_path / "again")
    launcher.run(
        "tests.fixes.again_job:resave", world_size=2, payload=payload, out=tmp_path / "out"
    )
    resumed = CaseRun(launcher, case, tmp_path / "again")
    with pytest.raises(VerifyError, match="may have made alike"):
        resumed.load(3)

"""F20 to F25 on the stock tree, where each must show, and with install(), where none may."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cases import Case
from tests.conftest import LauncherPool
from vime_optim.errors import VerifyError
from vime_optim.tools.megatron_source import RELEASES
from vime_optim.verify.runner import CaseRun, Outcome

Run = Callable[[Case], Outcome]


@dataclass(frozen=True)
class Fails:
    """A save or load of stock raises this, from this function of Megatron or above it."""

    phase: str
    error_type: str
    text: str = ""
    function: str = ""

    def check(self, outcome: Outcome) -> None:
        assert (outcome.failed_in, outcome.error_type) == (self.phase, self.error_type)
        assert re.search(self.text, outcome.error or ""), outcome.error
        assert f"in {self.function}" in (outcome.traceback or "")


@dataclass(frozen=True)
class Differs:
    """After a load of stock exactly these kinds are not what was saved."""

    kinds: frozenset[str]

    def check(self, outcome: Outcome) -> None:
        assert outcome.error is None, outcome.summary()
        assert outcome.stages[0].name == "loaded"
        assert set(outcome.stages[0].kinds) == self.kinds, outcome.summary()


def differs(*kinds: str) -> Differs:
    return Differs(frozenset(kinds))


EMPTY_HALF = "hybrid,pao,f=1,dp=2,pp=2,moe,ep=2,moe-on=last,1bucket"
#: Fault, words, and what stock does.
FAULTS: tuple[tuple[str, str, Fails | Differs], ...] = (
    (
        "F20",
        "fused,nopao,dp=2->1,fp32norm,noqk,1bucket",
        differs("exp_avg", "exp_avg_sq", "master", "model"),
    ),
    (
        "F20",
        "fused,nopao,dp=2,fp32norm,1bucket",
        Fails("save", "RuntimeError", r"The size of tensor a \(12\) must match .* b \(40\)"),
    ),
    ("F21", EMPTY_HALF, Fails("load", "UnpicklingError", "Weights only load failed", "load")),
    (
        "F21",
        "torch,dp=1,pp=2,moe,moe-on=last,train=experts",
        Fails("save", "AssertionError", function="state_dict"),
    ),
    (
        "F22",
        "fused,nopao,dp=4,dp_reshardable,bucket=40",
        Fails(
            "save",
            "AssertionError",
            "empty bucket encountered",
            "sharded_param_state_dp_reshardable",
        ),
    ),
    (
        "F23",
        "fused,nopao,dp=2,moe,ep=2,train=experts",
        Fails("save", "AttributeError", "'NoneType' .* 'param_groups'", "_synchronize_steps"),
    ),
    ("F24", "fused,nopao,dp=2,groups=max_lr,1bucket", differs("group.lr", "group.max_lr")),
    ("F24", "fused,nopao,dp=2,groups=min_lr,1bucket", differs("group.lr", "group.min_lr")),
    (
        "F24",
        "fused,nopao,dp=2,groups=decoupled,1bucket,dp_reshardable",
        differs("group.lr", "group.max_lr", "group.min_lr"),
    ),
    (
        "F25",
        "fused,nopao,dp=2,steps=0",
        Fails("save", "KeyError", "^'exp_avg'$", "get_parameter_state_dp_zero"),
    ),
    (
        "F25",
        "hybrid,pao,f=0.5,dp=2,fp16,scale=22",
        Fails("save", "KeyError", "^'master_param'$", "_get_main_param_and_optimizer_states"),
    ),
)
#: 0.19 has no classes in its common state, and comes as far as the step.
ELSEWHERE = {("0.19.2", EMPTY_HALF): differs("step")}
IN_CI = {
    ("0.16.1", words)
    for fault, words, _ in FAULTS
    if fault in ("F22", "F23") or words.endswith("max_lr,1bucket") or "noqk" in words
}
#: 0.19 pairs groups by these values; 0.15 has other means to make groups (see tests/models.py).
RIGHT_IN_STOCK = {("F24", "0.19.2"), ("F24", "0.15.3")}


@pytest.mark.parametrize(
    ("release", "fault", "words", "symptom"),
    [
        pytest.param(
            release,
            fault,
            words,
            symptom,
            id=f"{release}-{fault}-{words}",
            marks=() if (release, words) in IN_CI else pytest.mark.matrix,
        )
        for release in RELEASES
        for fault, words, symptom in FAULTS
    ],
)
def test_shows_in_stock_and_not_in_ours(
    release: str, fault: str, words: str, symptom: Fails | Differs, run: Run
) -> None:
    case = Case.parse(words, megatron=release)
    stock = run(case.replace(install=False))
    if (fault, release) in RIGHT_IN_STOCK:
        assert stock.exact, stock.summary()
    else:
        ELSEWHERE.get((release, words), symptom).check(stock)

    outcome = run(case)
    assert outcome.exact, "\n".join([outcome.summary(), *outcome.differences[:20]])
    assert outcome.sound, outcome.summary()


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

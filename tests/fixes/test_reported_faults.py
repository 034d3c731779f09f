"""F20 to F25 on the stock tree, where each must show, and with install(), where none may."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.cases import Case
from vime_optim.tools.megatron_source import RELEASES
from vime_optim.verify.runner import Outcome

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

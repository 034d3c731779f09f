"""Every case of the resume matrix is exact, sound, and went through the fixes it needs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import vime_optim
from tests.cases import Case
from tests.matrix import full, needed_faults, spread
from vime_optim.fixes.sharding import FULLY, TYPE_KEY, recorded_types
from vime_optim.tools.reader import Checkpoint
from vime_optim.verify.runner import Outcome

Run = Callable[[Case], Outcome]


#: Of CI's spread, what `make test` runs: each release, optimizer, format and kind of change once.
SHORT = {
    "0.15.3,hybrid,pao,f=0.5,dp_reshardable,dp=2",
    "0.15.3,torch,fully_reshardable,dp=2->3",
    "0.15.3,fused,pao,m=fp16,v=fp16,fully_reshardable,dp=2,async=forked",
    "0.16.1,fused,pao,fully_reshardable,dp=2->3",
    "0.16.1,hybrid,pao,f=1,default,dp=2,tied",
    "0.16.1,hybrid,nopao,f=1,fully_reshardable,dp=2,model-only",
    "0.17.1,hybrid,pao,f=0.25,fully_reshardable,dp=2,ep=2,moe",
    "0.18.2,hybrid,pao,f=0.5,fully_reshardable,dp=1,pp=2,moe,moe-on=last,train=experts",
    "0.19.2,hybrid,pao,f=1,fully_reshardable,dp=3->2",
    "0.19.2,hybrid,nopao,f=0.5,fully_reshardable,dp=2->3",
    "0.19.2,fused,pao,fully_reshardable,dp=3->2,fp32norm",
}


def _parameters() -> list[object]:
    in_ci = {case.name for case in spread()}
    assert in_ci >= SHORT

    def marks(case: Case) -> object:
        if case.name in SHORT:
            return ()
        return pytest.mark.ci if case.name in in_ci else pytest.mark.matrix

    return [pytest.param(case, id=case.name, marks=marks(case)) for case in full()]


@pytest.mark.parametrize("case", _parameters())
def test_resumes_exactly(case: Case, run: Run, tmp_path: Path) -> None:
    outcome = run(case)
    _record(outcome)

    assert outcome.error is None, f"{outcome.summary()}\n{outcome.traceback}"
    assert outcome.exact, "\n".join([outcome.summary(), *outcome.differences[:30]])
    assert outcome.sound, outcome.summary()
    assert outcome.facts["rng_untouched"], "loading the optimizer moved a random generator"
    _assert_recorded_type(case, tmp_path)
    missed = [fault for fault in sorted(needed_faults(case)) if not _hits(outcome, fault)]
    assert not missed, f"the fixes of {missed} were never reached: {outcome.hits}"


#: In the spread to see that install() leaves right what is right; all others need a fix.
RIGHT_IN_STOCK = {
    "0.16.1,fused,apex,nopao,dp_reshardable,dp=2",
    "0.19.2,fused,nopao,dp_reshardable,dp=2",
}


@pytest.mark.matrix
@pytest.mark.parametrize("case", spread(), ids=lambda case: case.name)
def test_a_case_of_the_spread_fails_on_stock(case: Case, run: Run) -> None:
    """A case that stock gets right shows nothing about the fixes."""
    outcome = run(case.replace(install=False))
    is_right = outcome.exact and outcome.sound
    assert is_right == (case.name in RIGHT_IN_STOCK), outcome.summary()


def _assert_recorded_type(case: Case, folder: Path) -> None:
    """The checkpoint says of which type it is, in both places where a loader looks.

    Under PAO with CPU offload every type becomes fully_reshardable, and so does no type at all.
    """
    (directory,) = folder.glob(f"*/iter_{case.num_steps:07d}")
    with Checkpoint(directory) as checkpoint:
        common = checkpoint.common_state()
    enforced = case.backend.optimizer == "hybrid" and case.backend.pao
    expected = FULLY if enforced or case.sharding is None else case.sharding
    assert common["content_metadata"][TYPE_KEY] == expected
    assert set(recorded_types(common)) == {expected}


def _record(outcome: Outcome) -> None:
    """Append the result where docs/make_matrix.py reads it, when `make matrix` asks for that."""
    path = os.environ.get("VIME_OPTIM_MATRIX_RESULTS")
    if path:
        result = {key: outcome.to_dict()[key] for key in ("case", "exact", "sound", "error")}
        with open(path, "a") as file:
            file.write(json.dumps(result) + "\n")


def _hits(outcome: Outcome, fault: str) -> int:
    fixes = {row.fix for row in vime_optim.status().rows if fault in row.faults}
    assert fixes, f"no fix claims {fault}"
    return sum(outcome.hits.get(fix, 0) for fix in fixes)

"""Every case of the resume matrix is exact, sound, and went through the fixes it needs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest

import vime_optim
from vime_optim.verify.case import Case
from vime_optim.verify.matrix import full, needed_faults, spread
from vime_optim.verify.runner import Outcome

Run = Callable[[Case], Outcome]


def _parameters() -> list[object]:
    in_ci = {case.name for case in spread()}
    return [
        pytest.param(case, id=case.name, marks=() if case.name in in_ci else pytest.mark.matrix)
        for case in full()
    ]


@pytest.mark.parametrize("case", _parameters())
def test_resumes_exactly(case: Case, run: Run) -> None:
    outcome = run(case)
    _record(outcome)

    assert outcome.error is None, f"{outcome.summary()}\n{outcome.traceback}"
    assert outcome.exact, "\n".join([outcome.summary(), *outcome.differences[:30]])
    assert outcome.sound, outcome.summary()
    missed = [fault for fault in sorted(needed_faults(case)) if not _hits(outcome, fault)]
    assert not missed, f"the fixes of {missed} were never reached: {outcome.hits}"


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

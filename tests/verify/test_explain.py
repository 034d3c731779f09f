"""Copies of a tied embedding that drift apart in the first run are called that."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cases import Case
from vime_optim.verify import explain as explaining
from vime_optim.verify.compare import REPLICAS_DISAGREE
from vime_optim.verify.explain import explain, faults
from vime_optim.verify.runner import Outcome, Stage

DRIFT = f"model embedding.word_embeddings.weight: {REPLICAS_DISAGREE} in 3 elements"
KINDS = {"master": 1, "exp_avg": 1, "model": 1}


def _outcome(words: str, difference: str) -> Outcome:
    outcome = Outcome(Case.parse(words))
    outcome.stages = [Stage("loaded", 100, [difference], KINDS)]
    return outcome


def test_tied_copies_on_two_halves_are_no_shifted_checkpoint() -> None:
    words = "0.16.1,hybrid,pao,f=0.5,dp=1,pp=2,tied"
    assert faults(_outcome(words, DRIFT)) == ["tied halves"]
    assert "drift apart in the first run" in explain(_outcome(words, DRIFT))[0]
    for other, difference in (
        (words.replace("f=0.5", "f=1"), DRIFT),
        (words.replace(",tied", ""), DRIFT),
        (words.replace("dp=1,pp=2", "dp=2"), DRIFT),
        (words, "master a: 3 of 5 elements differ"),
    ):
        assert faults(_outcome(other, difference)) == ["shifted"]


@pytest.mark.parametrize(("fault", "kind", "part"), explaining._ERRORS)
def test_every_error_has_its_cause(fault: str, kind: str, part: str) -> None:
    outcome = _outcome("0.16.1,torch,dp=2", "x")
    outcome.error, outcome.error_type = f"{kind}: {part}", kind
    (line,) = explain(outcome)
    assert line.startswith(f"{fault}: ")
    assert len(line) > 40


@pytest.mark.matrix
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_tied_copies_drift_where_one_is_on_the_host_alone(
    fraction: float, run: Callable[[str], Outcome]
) -> None:
    outcome = run(f"0.16.1,hybrid,pao,f={fraction},dp=1,pp=2,tied")
    if fraction == 1.0:
        assert outcome.exact
    else:
        assert faults(outcome) == ["tied halves"]

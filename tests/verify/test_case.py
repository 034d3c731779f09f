from __future__ import annotations

import json

import pytest

from tests.cases import Case
from tests.matrix import full, spread
from vime_optim.errors import VerifyError


def test_names_and_json_of_the_whole_matrix_read_back() -> None:
    cases = full()

    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert Case.parse(case.name) == case
        assert Case.from_dict(json.loads(json.dumps(case.to_dict()))) == case


def test_the_spread_is_part_of_the_matrix_and_covers_it() -> None:
    cases = spread()

    assert {case.name for case in cases} <= {case.name for case in full()}
    assert {case.megatron for case in cases} == {case.megatron for case in full()}
    assert {case.backend.optimizer for case in cases} == {"hybrid", "fused", "torch"}
    fractions = {c.backend.offload_fraction for c in cases if c.backend.optimizer == "hybrid"}
    assert fractions == {0.25, 0.5, 1.0}
    assert {case.sharding for case in cases} == {"fully_reshardable", "dp_reshardable", None}
    changes = {(c.layout != c.load_layout, c.moe, c.tied, c.model_only) for c in cases}
    assert len(changes) >= 6


def test_words() -> None:
    case = Case.parse("0.19.2,hybrid,nopao,f=0.25,dp_reshardable,dp=2->3,tp=2->1,load:fused,moe")

    assert case.megatron == "0.19.2"
    assert (case.layout.world_size, case.load_layout.world_size) == (4, 3)
    assert (case.backend.optimizer, case.backend.pao) == ("hybrid", False)
    assert (case.load_backend.optimizer, case.load_backend.pao) == ("fused", False)
    assert not case.same_layout
    assert not case.same_backend


def test_save_steps() -> None:
    assert Case.parse("steps=5,every=2").save_steps == (2, 4, 5)
    assert Case.parse("steps=5").save_steps == (5,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hybird", "unknown"),
        ("dp=two", "no number"),
        ("dp=0", "below 1"),
        ("dp=2,ep=3", "must divide"),
        ("f=1.5", "not within 0 and 1"),
        ("m=fp64", "dtype of exp_avg"),
        ("async=sometimes", "async mode"),
        ("steps=-1", "negative number"),
        ("every=0", "at least 1"),
    ],
)
def test_what_means_nothing_is_refused(text: str, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        Case.parse(text)


def test_a_description_with_unknown_fields_is_refused() -> None:
    with pytest.raises(VerifyError, match="cannot be read"):
        Case.from_dict({**Case().to_dict(), "color": "blue"})
    with pytest.raises(VerifyError, match="cannot be read"):
        Case.from_dict({})

"""Only the experts are trained: Megatron's `torch` format on a chain with a stub (F23)."""

from __future__ import annotations

import pytest

from tests.cases import Case
from tests.phases import Phases


@pytest.mark.parametrize(
    ("words", "wrote"),
    [
        ("0.16.1,fused,nopao,dp=2,moe,ep=2,train=experts", [2, 2]),
        pytest.param("0.15.3,torch,dp=2,moe,ep=2,train=experts", [2, 2], marks=pytest.mark.matrix),
        pytest.param(
            "0.19.2,fused,nopao,dp=4,moe,ep=2,train=experts",
            [2, 2, None, None],
            marks=pytest.mark.matrix,
        ),
    ],
)
def test_parameter_states_are_saved_and_loaded(
    words: str, wrote: list[int | None], phases: Phases
) -> None:
    case = Case.parse(words)
    answers = phases.run("tests.fixes.stub_job:torch_format", case)
    assert [answer["wrote"] for answer in answers] == wrote
    for answer in answers:
        assert (answer["members"], answer["stubs"]) == (2, 1)
        assert answer["direct"] == [{}]
        assert answer["differs"]
        assert answer["same"]
        assert answer["left"] == []

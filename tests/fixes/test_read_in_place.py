"""Loads through megatron-core: what was read by whom, in what memory, and what damage says."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases import Case
from tests.phases import Phases
from vime_optim.tools.megatron_source import RELEASES

MATRIX = pytest.mark.matrix
EVERY_RELEASE = [
    release if release in ("0.16.1", "0.19.2") else pytest.param(release, marks=MATRIX)
    for release in RELEASES
]


def save_and_load(
    case: Case, phases: Phases, *, stock: bool, phase: str, **more: Any
) -> list[dict[str, Any]]:
    """Save with or without vime_optim, load with it; gives what the loading ranks returned."""
    phases.run("vime_optim.verify.job:save", case.replace(install=not stock))
    return phases.run(f"tests.reshard.reading_job:{phase}", case, loading=True, **more)


def assert_exact(case: Case, phases: Phases) -> None:
    assert phases.differences(f"saved_{case.num_steps}", "loaded", skip={"grad"}) == []


@pytest.mark.parametrize("release", EVERY_RELEASE)
def test_what_stock_wrote_is_read_in_place(release: str, phases: Phases) -> None:
    case = Case.parse(f"{release},hybrid,pao,f=0.5,dp=2->3,1bucket")
    for answer in save_and_load(case, phases, stock=True, phase="resume"):
        assert answer["hits"]["read-in-place"] > 0
        assert not [text for text in answer["counters"] if "torch's reader" in text]
    assert_exact(case, phases)


@pytest.mark.parametrize("backend", ["m=fp16,v=fp8", "rem"])
@pytest.mark.parametrize("release", EVERY_RELEASE)
def test_coded_states_share_the_memory_of_the_largest(
    release: str, backend: str, phases: Phases
) -> None:
    case = Case.parse(f"{release},fused,pao,{backend},dp=2")
    for answer in save_and_load(case, phases, stock=False, phase="resume"):
        coded = answer["coded"]
        assert 0 < coded["largest"] < coded["all"]
        assert coded["most"] == coded["largest"]
        assert not [text for text in answer["counters"] if "torch's reader" in text]
    assert_exact(case, phases)


@pytest.mark.parametrize("release", [pytest.param("0.16.1", marks=MATRIX), "0.19.2"])
def test_coded_states_load_through_another_reader(release: str, phases: Phases) -> None:
    case = Case.parse(f"{release},fused,pao,rem,v=fp16,dp=2")
    for answer in save_and_load(case, phases, stock=False, phase="resume_by_torch"):
        assert answer["hits"]["read-in-place"] == 0
        assert answer["coded"]["all"] == 0  # each had a buffer of its own
    assert_exact(case, phases)


@pytest.mark.parametrize("algorithm", ["broadcast", pytest.param("gather_object", marks=MATRIX)])
@pytest.mark.parametrize("release", [pytest.param("0.16.1", marks=MATRIX), "0.19.2"])
def test_coded_states_that_ranks_read_for_each_other(
    release: str, algorithm: str, phases: Phases
) -> None:
    """Tensor-parallel ranks share norms, and a load spread over the world reads them once."""
    case = Case.parse(f"{release},fused,pao,rem,v=fp16,dp=2,tp=2")
    answers = save_and_load(
        case, phases, stock=False, phase="resume_exchanging", algorithm=algorithm
    )
    assert sum(answer["given"] for answer in answers) > 0
    assert sum(answer["coded"]["all"] for answer in answers) > 0
    assert_exact(case, phases)


@pytest.mark.parametrize("damage", ["cut", "spoil"])
@pytest.mark.parametrize("release", EVERY_RELEASE)
def test_a_damaged_file_raises_with_its_name_and_key(
    release: str, damage: str, phases: Phases
) -> None:
    """Of stock's files, which no manifest protects."""
    case = Case.parse(f"{release},hybrid,pao,f=1,dp=1,1bucket")
    (answer,) = save_and_load(case, phases, stock=True, phase="load_damaged", damage=damage)
    assert ".distcp: " in answer["error"]
    what = "ends before its tensor does" if damage == "cut" else "cannot be read"
    assert what in answer["error"]
    assert answer["is_ours"]

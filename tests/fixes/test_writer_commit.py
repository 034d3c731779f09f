"""A rank that fails alone in a save or a load: all raise, and nobody goes on with half of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.writer.joint import LOADS, RANK_0_ALONE, SAVES
from tests.writer.launch import launch, results, tree_of

_FULL = [
    *({"place": place, "who": int(place not in RANK_0_ALONE)} for place in SAVES[:8]),
    *({"place": place, "who": int(place not in RANK_0_ALONE)} for place in SAVES[9:]),
    {"place": "validate", "who": 0},
    {"place": "distribute", "parallel": True},
    {"place": "local plan", "is_async": True},
    {"place": "global plan", "who": 0, "is_async": True},
    {"place": "prepare write", "is_async": True},
    {"place": "local plan", "interrupt": True},
    {"place": "build", "interrupt": True},
    {"place": "finish plan", "who": 0, "interrupt": True},
    *({"place": place} for place in LOADS),
    *({"place": place, "parallel": True} for place in ("read", "load plan", "load translate")),
    {"place": "read", "interrupt": True},
    {"place": "read", "who": 0},
]  # fmt: skip


def run(tree: Path, root: Path, cases: list[dict[str, Any]]) -> None:
    environment = {"VIME_OPTIM_TEST_ALL": "1"}
    arguments = {"root": str(root), "cases": cases}
    found = results(launch(tree, "joint", arguments=arguments, environment=environment))
    wrong = [line for outcome in found[0]["outcomes"] for line in _wrong(outcome)]
    assert not wrong, "\n".join(wrong)
    assert all(rank["good"] for rank in found)


#: torch's own, which says on every rank who failed: planning and reading of a load up to 0.18.
_TORCH = "CheckpointException"


def _wrong(outcome: dict[str, Any]) -> list[str]:
    """What is not as it must be, one line for each thing."""
    case, ranks = outcome["case"], outcome["ranks"]
    saves = case["place"] in SAVES
    who = case.get("who", 1)
    own = "KeyboardInterrupt" if case.get("interrupt") else "Injected"
    others = ("WriterError", "PlanError") if saves else ("CheckpointError",)
    said = (f"rank {who}: ", f"ranks:dict_keys([{who}])")
    began = case["place"] in ("read", "merge")
    wrong = []

    def note(text: str) -> None:
        wrong.append(f"{case}: rank {number} {text}")

    for number, rank in enumerate(ranks):
        text = rank["text"]
        if not rank["reached"]:
            note("never came to it")
        if rank["type"] not in ((own, *others, _TORCH) if number == who else (*others, _TORCH)):
            note(f"raised {rank['type']}: {text[:300]}")
        elif number != who and not (own in text and any(way in text for way in said)):
            note(f"does not say who and what: {text[:300]}")
        if rank["complete"]:
            note("sees a complete checkpoint")
        refused = rank["step"] == rank["save"] == "OptimizerStateError"
        if not saves and refused != began:
            note(f"then stepped: {rank['step']}, saved: {rank['save']}")
    return wrong


@pytest.mark.parametrize("version", ["0.16.1", "0.19.2"])
def test_all_raise_when_one_fails(version: str, tmp_path: Path) -> None:
    run(tree_of(version), tmp_path, _FULL)


# Megatron's own fully parallel strategies of 0.15 need a numpy before 2.
_OF_0_15 = [case for case in _FULL if not case.get("parallel")]


@pytest.mark.matrix
@pytest.mark.parametrize("version", ["0.15.3", "0.17.1", "0.18.2"])
def test_all_raise_when_one_fails_in_other_releases(version: str, tmp_path: Path) -> None:
    run(tree_of(version), tmp_path, _OF_0_15 if version == "0.15.3" else _FULL)

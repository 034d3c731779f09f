"""An outcome is exact or sound only where something was compared, or measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import Case
from vime_optim.verify.runner import CaseRun, Outcome, Stage

CASE = Case.parse("0.16.1,hybrid,pao,f=1,dp=2")
OF_A_STEP = {"exp_avg", "exp_avg_sq", "step"}


def record(kinds: set[str], **changed: float) -> dict[str, Any]:
    """One rank's capture of a parameter of six elements, with these kinds of state."""
    part = {
        "key": "w",
        "global_shape": (6,),
        "offset": (0,),
        "shape": (6,),
        "index": torch.arange(6),
    }
    tensors = {k: torch.full((6,), changed.get(k, 1.0)) for k in kinds - {"step"}}
    scalars = {"step": changed.get("step", 3.0)} if "step" in kinds else {}
    piece = {"place": [part], "start": 0, "end": 6, "tensors": tensors, "scalars": scalars}
    return {"pieces": [piece], "scalars": {"iteration": 3}, "rng": {}, "memory": {}}


def compared(folder: Path, case: Case, first: Any, second: Any, **options: Any) -> Outcome:
    run = CaseRun(None, case, folder)  # type: ignore[arg-type]
    for name, content in (("saved_3", first), ("loaded", second)):
        (run.place.captures / name).mkdir(parents=True)
        torch.save(content, run.place.captures / name / "rank0.pt")
    run._compare("loaded", "saved_3", "loaded", **options)
    return run.outcome


def test_equal_states_are_exact(tmp_path: Path) -> None:
    kinds = {"model", "master", *OF_A_STEP}
    outcome = compared(tmp_path, CASE, record(kinds), record(kinds))
    assert outcome.exact
    assert outcome.stages[0].compared == 6
    assert outcome.summary().startswith("exact, but unsound: None bytes held")


@pytest.mark.parametrize("lost", ["model", "exp_avg", "exp_avg_sq", "step"])
def test_what_neither_run_captured_is_missed(lost: str, tmp_path: Path) -> None:
    kinds = {"model", "master", *OF_A_STEP} - {lost}
    outcome = compared(tmp_path, CASE, record(kinds), record(kinds))
    assert not outcome.exact
    (text,) = outcome.differences
    assert text == f"{lost} all names: nothing was captured, so nothing was compared"
    assert lost in outcome.summary()


def test_a_model_alone_is_enough_where_nothing_else_was_asked_for(tmp_path: Path) -> None:
    alone = CASE.replace(model_only=True)
    found = compared(tmp_path / "a", alone, record({"model"}), record({"model"}), only={"model"})
    assert found.exact
    lost = compared(tmp_path / "b", alone, record({"master"}), record({"master"}), only={"model"})
    assert not lost.exact
    before = CASE.replace(num_steps=0)
    assert compared(tmp_path / "c", before, record({"model"}), record({"model"})).exact


def test_an_outcome_of_nothing_is_neither_exact_nor_sound() -> None:
    outcome = Outcome(CASE)
    assert not outcome.exact
    assert not outcome.sound
    assert outcome.summary() == "nothing was compared"
    assert outcome.to_dict()["sound"] is None


@pytest.mark.parametrize(
    ("own_bytes", "held_bytes", "aliased", "sound"),
    [
        (64, 64, [], True),
        (0, 0, [], False),
        (64, 128, [], False),
        (64, 64, ["rank 0: 1.exp_avg with 0.exp_avg"], False),
    ],
)
def test_sound_is_measured(
    own_bytes: int, held_bytes: int, aliased: list[str], sound: bool
) -> None:
    memory = {"own_bytes": own_bytes, "held_bytes": held_bytes, "aliased": aliased}
    outcome = Outcome(CASE, [Stage("loaded", 9, [])], facts={"memory": memory})
    assert outcome.exact
    assert outcome.sound == sound
    assert outcome.to_dict()["sound"] == sound
    # Weights alone: an optimizer that has not stepped yet may hold no state at all.
    empty = {"own_bytes": 0, "held_bytes": 0, "aliased": []}
    assert Outcome(CASE.replace(model_only=True), facts={"memory": empty}).sound

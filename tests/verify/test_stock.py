"""Stock megatron-core fails as listed, so the resume matrix can fail too.

With one bucket, since with several padded ones every fully_reshardable file of stock is shifted.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vime_optim.tools.megatron_source import RELEASES
from vime_optim.verify.explain import explain, faults
from vime_optim.verify.runner import Outcome

Run = Callable[[str], Outcome]


def _ends(releases: tuple[str, ...]) -> list[object]:
    """All of them; those between the first and the last are left to `make test-all`."""
    return [
        pytest.param(r, marks=() if r in (releases[0], releases[-1]) else pytest.mark.matrix)
        for r in releases
    ]


NEWER = _ends(RELEASES[1:])
WITH_CLASSES_IN_COMMON_STATE = _ends(RELEASES[:-1])


def _stock(run: Run, release: str, words: str) -> Outcome:
    outcome = run(f"{release},{words},dp=2,1bucket,stock")
    assert not outcome.exact or not outcome.sound
    if not outcome.exact:
        assert explain(outcome)
    return outcome


def test_f1_the_save_fails(run: Run) -> None:
    outcome = _stock(run, "0.15.3", "hybrid,pao,f=1,dp_reshardable")

    assert (outcome.failed_in, outcome.error_type) == ("save", "AssertionError")
    assert faults(outcome) == ["F1"]


@pytest.mark.parametrize("release", NEWER)
def test_f3_the_resumed_run_is_silently_another_one(run: Run, release: str) -> None:
    outcome = _stock(run, release, "hybrid,pao,f=1,dp_reshardable")

    assert outcome.error is None
    assert faults(outcome) == ["F3"]
    assert "step decoder.final_layernorm.weight: 1.0 instead of 3.0" in outcome.differences
    resumed = outcome.stages[-1]
    assert {"step", "master", "exp_avg", "exp_avg_sq", "model"} <= set(resumed.kinds)


@pytest.mark.parametrize("release", _ends(RELEASES))
def test_f8_a_fresh_torch_adam_cannot_be_loaded_into(run: Run, release: str) -> None:
    outcome = _stock(run, release, "torch")

    assert (outcome.failed_in, outcome.error_type) == ("load", "AssertionError")
    assert faults(outcome) == ["F8"]


@pytest.mark.parametrize("release", WITH_CLASSES_IN_COMMON_STATE)
def test_f9_the_load_is_refused(run: Run, release: str) -> None:
    outcome = _stock(run, release, "hybrid,pao,f=1")

    assert (outcome.failed_in, outcome.error_type) == ("load", "UnpicklingError")
    assert faults(outcome) == ["F9"]


def test_f4_the_step_of_the_device_half_is_frozen(run: Run) -> None:
    outcome = _stock(run, "0.19.2", "hybrid,pao,f=0.5")

    assert faults(outcome) == ["F4"]
    assert "step" not in outcome.stages[0].kinds
    assert any("3.0 instead of 5.0" in text for text in outcome.stages[-1].differences)


def test_f5_masters_are_looked_up_that_do_not_exist(run: Run) -> None:
    assert faults(_stock(run, "0.19.2", "hybrid,nopao,f=1,dp_reshardable")) == ["F5"]


def test_f6_a_padding_marker_is_taken_for_a_state(run: Run) -> None:
    assert faults(_stock(run, "0.15.3", "fused,pao,dp_reshardable")) == ["F6"]


@pytest.mark.parametrize("release", ["0.15.3", "0.19.2"])
def test_f7_a_remainder_comes_back_as_float32(run: Run, release: str) -> None:
    assert faults(_stock(run, release, "fused,pao")) == ["F7"]


def test_f10_restored_moments_share_and_hold_too_much(run: Run) -> None:
    outcome = _stock(run, "0.19.2", "hybrid,pao,f=1")
    memory = outcome.facts["memory"]

    assert outcome.exact
    assert memory["aliased"]
    assert memory["held_bytes"] > 2 * memory["own_bytes"]
    assert not outcome.facts["rng_untouched"]  # F15: state is made by a step on random gradients
    assert "unsound" in outcome.summary()


def test_f16_no_type_means_a_dead_one(run: Run) -> None:
    assert faults(_stock(run, "0.19.2", "hybrid,pao,f=1,default")) == ["F16"]


def test_f29_steps_that_are_tensors_are_compared_as_objects(run: Run) -> None:
    outcome = _stock(run, "0.19.2", "fused,apex,nopao,capturable")

    assert (outcome.failed_in, outcome.error_type) == ("save", "AssertionError")
    assert faults(outcome) == ["F29"]


def test_f12_the_first_step_throws_loaded_weights_away(run: Run) -> None:
    outcome = _stock(run, "0.19.2", "hybrid,nopao,f=1,model-only")

    assert faults(outcome) == ["F12"]
    assert "model" in outcome.stages[-1].kinds


@pytest.mark.parametrize("release", [pytest.param("0.15.3", marks=pytest.mark.matrix), "0.19.2"])
def test_several_padded_buckets_are_saved_shifted(run: Run, release: str) -> None:
    outcome = run(f"{release},fused,nopao,dp=2,stock")

    assert faults(outcome) == ["shifted"]
    assert {"master", "exp_avg", "exp_avg_sq"} <= set(outcome.stages[0].kinds)
    assert "model" not in outcome.stages[0].kinds


@pytest.mark.parametrize("release", ["0.15.3", "0.19.2"])
def test_what_stock_gets_right_is_exact(run: Run, release: str) -> None:
    """The comparison has no false alarm: FusedAdam without PAO, one bucket."""
    outcome = run(f"{release},fused,nopao,dp=2,1bucket,stock")

    assert outcome.exact, outcome.summary()
    assert outcome.stages[0].compared > 100

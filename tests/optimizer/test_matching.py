"""Which saved param group belongs to which of the optimizer's (F24)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from vime_optim.errors import CheckpointError
from vime_optim.optimizer.matching import match_groups

OLD_KEYS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
NEW_KEYS = (*OLD_KEYS, "max_lr", "min_lr")


def group(**own: Any) -> dict[str, Any]:
    base = {
        "wd_mult": 1.0,
        "lr_mult": 1.0,
        "is_expert_parallel": False,
        "is_decoupled_lr": False,
        "default_config": True,
        "max_lr": 0.02,
        "min_lr": 0.001,
    }
    return {**base, "lr": 0.0, "weight_decay": 0.1, **own}


def saved(own: dict[str, Any], label: int) -> dict[str, Any]:
    """As a checkpoint has it: later values, and a label to know it by."""
    return {**own, "step": 3, "label": label}


def labels(current: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[int]:
    return [g["label"] for g in match_groups(current, found, OLD_KEYS)]


@pytest.mark.parametrize(
    "groups",
    [
        [group(), group(max_lr=0.005, default_config=False), group(wd_mult=0.0)],
        [group(), group(min_lr=0.005, default_config=False)],
        [group(), group(lr=0.5), group(lr=0.25)],
        [group(), group(wd_mult=0.5), group(lr_mult=0.5)],
        [group(), group(start_wd=0.0), group(start_wd=0.0, end_wd=0.0)],
        [group(is_decoupled_lr=True, max_lr=0.005), group()],
        [group(), group(is_expert_parallel=True), group(is_expert_parallel=True, max_lr=0.1)],
        [group(), group(eps=1e-6), group(betas=(0.9, 0.95))],
    ],
)
def test_groups_are_found_in_any_order(groups: list[dict[str, Any]]) -> None:
    stored = [saved(own, label) for label, own in enumerate(groups)]
    for order in itertools.permutations(range(len(groups))):
        assert labels(groups, [stored[i] for i in order]) == list(range(len(groups)))


@pytest.mark.parametrize("number", [2, 3])
def test_each_twin_gets_a_saved_group_of_its_own(number: int) -> None:
    """Groups that agree in every value are paired by order: the first one's is not for all."""
    twins = [group() for _ in range(number)]
    others = [group(wd_mult=0.0)]
    stored = [{**own, "step": 3 + label} for label, own in enumerate([*twins, *others])]
    found = match_groups([*twins, *others], stored, OLD_KEYS)
    assert [g["step"] for g in found] == [3 + label for label in range(number + 1)]
    # Fewer were saved: the last one stands in for those that are left.
    found = match_groups(twins, stored[:1], OLD_KEYS)
    assert [g["step"] for g in found] == [3] * number


def test_twins_are_told_by_what_training_changed() -> None:
    """The same by their options, and in the file in the other order: the present rate decides."""
    current = [group(lr=0.25), group(lr=0.5)]
    stored = [saved(group(lr=0.5), 0), saved(group(lr=0.25), 1)]
    assert labels(current, stored) == [1, 0]


def test_a_learning_rate_changed_for_this_run_keeps_the_pairs() -> None:
    stored = [saved(group(), 0), saved(group(max_lr=0.005, default_config=False), 1)]
    changed = [group(max_lr=0.5), group(max_lr=0.005, default_config=False)]
    both = [group(max_lr=0.5), group(max_lr=0.1, default_config=False)]
    for current in (changed, both):
        assert labels(current, stored) == [0, 1]
        with pytest.raises(CheckpointError, match="another max_lr"):  # 0.19 compares it
            match_groups(current, stored, NEW_KEYS)


def test_experts_and_dense_groups_stand_in_for_each_other() -> None:
    current = [group(), group(is_expert_parallel=True)]
    found = match_groups(current, [saved(group(), 0)], OLD_KEYS)
    assert [(g["label"], g["is_expert_parallel"]) for g in found] == [(0, False), (0, True)]


def test_a_decoupled_rate_of_an_older_release_is_told_by_its_value() -> None:
    old = [saved(group(is_decoupled_lr=True, max_lr=0.005), 0), saved(group(), 1)]
    for g in old:
        del g["default_config"]
    current = [group(), group(max_lr=0.005, default_config=False)]
    assert labels(current, old) == [1, 0]
    assert match_groups(current, old, OLD_KEYS)[1]["is_decoupled_lr"] is False


@pytest.mark.parametrize(
    ("current", "stored"),
    [
        ([group(wd_mult=0.5)], [group()]),
        ([group(), group(max_lr=0.1, default_config=False)], [group()]),
        # A resume with F24 has given both the values of the last.
        (
            [group(), group(max_lr=0.005, default_config=False)],
            [group(max_lr=0.005, default_config=False)] * 2,
        ),
        ([group(max_lr=0.3)], [group(max_lr=0.1), group(max_lr=0.2)]),
        ([group(), group()], [group(lr=0.1), group(lr=0.2)]),
    ],
)
def test_what_cannot_be_told_is_refused(
    current: list[dict[str, Any]], stored: list[dict[str, Any]]
) -> None:
    with pytest.raises(CheckpointError, match="param group"):
        match_groups(current, [saved(own, i) for i, own in enumerate(stored)], OLD_KEYS)


@pytest.mark.parametrize("key", ["wd_mult", "lr_mult"])
def test_groups_of_other_multipliers_are_never_paired(key: str) -> None:
    """Also where the release compares nothing: one group is left over on each side."""
    with pytest.raises(CheckpointError, match="no saved param group fits"):
        match_groups([group(**{key: 0.5})], [saved(group(), 0)])

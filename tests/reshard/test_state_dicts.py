"""The one walk over state dicts, and all that use it: however deep, and once around a circle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vime_optim.commit import loading
from vime_optim.files import safe_load
from vime_optim.fixes import chained, sharding
from vime_optim.fixes.common_state import mend_common_state
from vime_optim.optimizer.groups_only import COUNTS
from vime_optim.reshard.engine import ParamState, param_states
from vime_optim.state_dicts import copied, replaced, walk

DEEP = 3000


def nested(value: Any, depth: int) -> dict[str, Any]:
    """Dicts and lists in turns around a value, with a circle on the way."""
    for level in range(depth):
        value = [value, level] if level % 2 else {"model": level, "next": value}
    whole = {"optimizers": value}
    whole["self"] = whole
    return whole


def test_containers_come_before_what_they_hold_and_circles_end() -> None:
    shared = {"x": object()}
    state: dict[str, Any] = {"a": [shared, 2], "b": shared}
    state["a"].append(state)
    found = list(walk(state))
    assert [path for path, _ in found] == [
        (),
        ("a",),
        ("a", 0),
        ("a", 0, "x"),
        ("a", 2),
        ("b",),
    ]
    assert [path for path, _ in walk(state, leaves=list)] == [(), ("a",), ("b",), ("b", "x")]


def test_numbers_and_texts_are_passed_over() -> None:
    """A save walks some times: each number of a list of millions would take its time each time."""
    value = torch.ones(1)
    plain = [1, 1.5, True, None, "text", b"bytes"]
    assert list(walk([*plain, {"x": value, "y": 2}]))[1:] == [
        ((6,), {"x": value, "y": 2}),
        ((6, "x"), value),
    ]
    found = safe_load.walk({"plain": [*plain, value], "step": 1})
    assert [path for _, _, _, path in found] == ["plain", "step", "plain.6"]


@pytest.mark.parametrize("depth", [0, 3, 7, DEEP])
def test_everything_is_found_however_deep(depth: int) -> None:
    params = ParamState({0: {}})
    state = sharding.ShardedOptimizerState(param_state=params)
    state.owner = object()
    state[sharding.RECORD_KEY] = sharding.FULLY
    groups = [{"step": 3}]
    state["optimizer"] = {COUNTS: True, "param_groups": groups}
    whole = nested(state, depth)
    assert list(param_states(whole)) == [params]
    assert [found for _, found in sharding.optimizer_states(whole)] == [state]
    assert list(sharding.recorded_types(whole)) == [sharding.FULLY]
    assert [part["param_groups"] for _, part in chained._counting_parts(whole)] == [groups]
    assert list(loading._members(whole)) == [state.owner]


def test_a_state_that_was_not_built_is_raised_however_deep() -> None:
    error = LookupError("no state")
    with pytest.raises(LookupError, match="no state"):
        list(sharding.optimizer_states(nested(sharding.RefusedState(error), DEEP)))


@pytest.mark.parametrize("depth", [0, 7, 100])
def test_stray_steps_are_dropped_however_deep(depth: int) -> None:
    stray = {"param_state": {0: [{"step": 1}]}, "param_state_sharding_type": "dp_reshardable"}
    (path,) = mend_common_state(nested(stray, depth))
    assert path.endswith("param_state")
    assert "param_state" not in stray


def test_replacing_leaves_the_callers_own_as_it_is() -> None:
    state = {"a": [{"b": 1}, 2], "c": {}}
    made = replaced(state, ("a", 0, "b"), 5)
    assert made == {"a": [{"b": 5}, 2], "c": {}}
    assert state == {"a": [{"b": 1}, 2], "c": {}}
    assert made["c"] is state["c"]
    assert replaced(state, (), 7) == 7


def test_a_copy_has_containers_of_its_own_of_the_same_kind() -> None:
    leaf = object()
    params = ParamState({0: [leaf]})
    params.dist_opt = "it"
    state: dict[str, Any] = {"a": params, "b": params}
    state["self"] = state
    made = copied(state)
    assert made["self"] is made
    assert made["a"] is made["b"]
    assert made["a"] is not params
    assert type(made["a"]) is ParamState
    assert made["a"].dist_opt == "it"
    assert made["a"][0] is not params[0]
    assert made["a"][0][0] is leaf

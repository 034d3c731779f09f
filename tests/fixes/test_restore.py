"""Restored states own their storage; what is no state is passed over (F6, F8, F10)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vime_optim.errors import OptimizerStateError
from vime_optim.fixes.restore import restore_states


def trained() -> tuple[Any, torch.Tensor]:
    """A DistributedOptimizer's part that is asked for here, around torch's Adam."""
    model_param = torch.nn.Parameter(torch.zeros(4))
    shard = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    shard.grad = torch.ones(3)
    inner = torch.optim.Adam([shard])
    inner.step()
    return SimpleNamespace(
        optimizer=inner,
        config=SimpleNamespace(),
        model_fp32_groups=[[model_param]],
        model_float16_groups=[[]],
        model_param_group_index_map={model_param: (0, 0)},
        model_chunks=[torch.nn.ParameterList([model_param])],
    ), model_param


def values(first: float) -> torch.Tensor:
    return torch.arange(3, dtype=torch.float32) + first


@pytest.mark.parametrize("master", ["param", "master_param", "fp32_param"])
def test_values_are_copied_and_markers_passed_over(master: str) -> None:
    optimizer, param = trained()
    (shard,) = optimizer.optimizer.param_groups[0]["params"]
    held = dict(optimizer.optimizer.state[shard])
    loaded = {master: values(10), "exp_avg": values(20), "exp_avg_sq": values(30)}
    restore_states(optimizer, param, {**loaded, "padding": False, "step": torch.tensor(7.0)})
    state = optimizer.optimizer.state[shard]
    assert all(state[name] is held[name] for name in held), "a state has another storage"
    assert torch.equal(shard.detach(), values(10))
    assert torch.equal(state["exp_avg"], values(20))
    assert torch.equal(state["exp_avg_sq"], values(30))
    assert state["step"] == 1
    loaded["exp_avg"].zero_()
    assert torch.equal(state["exp_avg"], values(20))


@pytest.mark.parametrize("wrong", [None, torch.zeros(4)])
def test_a_state_that_is_missing_or_of_another_size_is_named(wrong: Any) -> None:
    optimizer, param = trained()
    loaded = {"param": values(1), "exp_avg": values(2), "exp_avg_sq": wrong}
    with pytest.raises(OptimizerStateError, match="does not fit") as caught:
        restore_states(optimizer, param, loaded)
    assert "exp_avg_sq of 0" in str(caught.value.where)
    assert caught.value.expected == "3 elements"

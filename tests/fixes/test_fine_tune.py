"""Megatron's method is let at the masters that it would leave out (F12); on whole runs: the cases
`model-only` of the resume matrix."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vime_optim.fixes import fine_tune
from vime_optim.registry import Verdict, around


class Hybrid(torch.optim.SGD):
    def __init__(self) -> None:
        super().__init__([torch.nn.Parameter(torch.zeros(1))])
        self.sub_optimizers: list[Any] = []
        self.param_to_inner_param: dict[Any, Any] = {}
        self.refreshed = 0

    def update_fp32_param_by_new_param(self) -> None:
        self.refreshed += 1


class Optimizer:
    config = SimpleNamespace()
    ddp_config = SimpleNamespace()

    def __init__(self) -> None:
        self.model_float16_groups: Any = [["a", "b"]]
        self.shard_fp32_from_float16_groups: Any = [["A", "B"]]
        self.optimizer, self.seen = Hybrid(), []

    def copy(self, state_dict: Any = None) -> None:
        if isinstance(self.optimizer, Hybrid):
            return  # the fault
        inner: Any = self.optimizer
        self.seen.append((inner.param_groups, self.model_float16_groups, state_dict))
        if state_dict == "bad":
            raise LookupError("no such parameter")


@pytest.mark.parametrize("state_dict", [None, "given"])
def test_megatrons_masters_come_first_and_the_copies_follow(state_dict: Any) -> None:
    optimizer = Optimizer()
    inner = optimizer.optimizer
    around(fine_tune._copy_params)(Optimizer.copy, lambda: None)(
        optimizer, *([state_dict] if state_dict else [])
    )
    assert optimizer.seen == [(inner.param_groups, [["a", "b"]], state_dict)]
    assert optimizer.optimizer is inner
    assert inner.refreshed == 1


def test_an_error_leaves_the_optimizer_as_it_was() -> None:
    optimizer = Optimizer()
    inner = optimizer.optimizer
    with pytest.raises(LookupError):
        around(fine_tune._copy_params)(Optimizer.copy, lambda: None)(optimizer, "bad")
    assert optimizer.optimizer is inner
    assert inner.refreshed == 0


def leaves_out(self: Any, state_dict: Any) -> None:
    self.optimizer.update_fp32_param_by_new_param()


def marked(self: Any, state_dict: Any) -> None:
    # vime_optim: fine-tune
    self.optimizer.update_fp32_param_by_new_param()


def right(self: Any, state_dict: Any) -> None: ...


def other(self: Any) -> None: ...


@pytest.mark.parametrize(
    ("method", "verdict"),
    [
        (leaves_out, Verdict.NEEDED),
        (marked, Verdict.FIXED_UPSTREAM),
        (right, Verdict.FIXED_UPSTREAM),
        (other, Verdict.NOT_UNDERSTOOD),
    ],
)
def test_the_code_is_looked_at(method: Any, verdict: Verdict) -> None:
    assert fine_tune._diagnose(sys.modules[__name__], method).verdict is verdict

"""The main stream waits for the copies of updated parameters (F17)."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from vime_optim.fixes import copy_back_order
from vime_optim.registry import Verdict, around


class Stream:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def record_event(self) -> Stream:
        self.log.append("recorded")
        return self

    def wait(self, stream: Any) -> None:
        self.log.append(f"{stream} waits")


class Hybrid:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.param_to_inner_param: dict[Any, Any] = {}
        param = torch.nn.Parameter(torch.ones(2))
        param.grad = torch.ones(2)
        self.gpu_optimizer, host = torch.optim.SGD([param]), torch.optim.SGD([param])
        self.sub_optimizers = [self.gpu_optimizer, host]
        self._h2d_stream = Stream(self.log)

    def _register_param_copy_back_gpu_hook(self) -> None:
        self.log.append("registered")


def waits_on_gradients(self: Any) -> None:
    self._d2h_stream.record_event().wait(torch.cuda.current_stream())


def waits_on_parameters(self: Any) -> None:
    self._h2d_stream.record_event().wait(torch.cuda.current_stream())


def waits_otherwise(self: Any) -> None: ...


@pytest.mark.parametrize(
    ("method", "verdict"),
    [
        (waits_on_gradients, Verdict.NEEDED),
        (waits_on_parameters, Verdict.FIXED_UPSTREAM),
        (waits_otherwise, Verdict.NOT_UNDERSTOOD),
    ],
)
def test_the_code_is_looked_at(method: Any, verdict: Verdict) -> None:
    assert copy_back_order._diagnose(sys.modules[__name__], method).verdict is verdict


def test_a_step_on_the_host_is_followed_by_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "main")
    hybrid = Hybrid()
    around(copy_back_order._copy_back)(
        Hybrid._register_param_copy_back_gpu_hook, lambda: hybrid.log.append("hit")
    )(hybrid)
    assert hybrid.log == ["hit", "registered"]
    hybrid.gpu_optimizer.step()
    assert hybrid.log == ["hit", "registered"]
    hybrid.sub_optimizers[1].step()
    assert hybrid.log[2:] == ["recorded", "main waits"]

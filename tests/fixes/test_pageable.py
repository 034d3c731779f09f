"""Host memory that cannot be pinned stays pageable, with one warning."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from vime_optim.fixes import pageable
from vime_optim.registry import around


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pageable, "_warned_pageable", False)


def refuse(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    raise RuntimeError("no such memory\nand more")


def test_what_cannot_be_pinned_is_given_back_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    held = torch.ones(3)

    def split(self: Any) -> Any:
        return [held.pin_memory(), held.pin_memory()]

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        first, second = around(pageable._split_groups)(split, lambda: None)(None)
    assert first is held is second
    assert len(said) == 1
    assert "no such memory)" in str(said[0].message)
    assert torch.Tensor.pin_memory is refuse, "the method is replaced for that time alone"


class Hybrid:
    pin_cpu_grads = True

    def __init__(self, always: bool) -> None:
        self.always, self.calls = always, 0

    def set_grads(self) -> None:
        self.calls += 1
        if self.pin_cpu_grads or self.always:
            raise RuntimeError("no such memory")


def test_gradients_are_copied_again_without_pinning() -> None:
    wrapped = around(pageable._set_grads)(Hybrid.set_grads, lambda: None)
    hybrid = Hybrid(always=False)
    with pytest.warns(UserWarning, match="cannot be pinned"):
        wrapped(hybrid)
    wrapped(hybrid)
    assert hybrid.calls == 3
    other = Hybrid(always=True)
    with pytest.raises(RuntimeError, match="no such memory"):
        wrapped(other)
    assert other.pin_cpu_grads, "an error of another cause changes nothing"

"""States are read as float32 while Megatron gathers them, and only then (F7)."""

from __future__ import annotations

from typing import Any

import pytest

from vime_optim.fixes import canonical_master
from vime_optim.optimizer.record import record_of
from vime_optim.registry import around


class Optimizer:
    fails = False

    def get_parameter_state_dp_zero(self, *args: Any) -> Any:
        if self.fails:
            raise LookupError("gone")
        return record_of(self).is_canonical, args


def test_states_are_canonical_within_the_gathering_alone() -> None:
    hits: list[int] = []
    gather = around(canonical_master._gather)(
        Optimizer.get_parameter_state_dp_zero, lambda: hits.append(1)
    )
    one, other = Optimizer(), Optimizer()
    assert gather(one, "gloo") == (True, ("gloo",))
    assert not record_of(one).is_canonical
    one.fails = True
    with pytest.raises(LookupError):
        gather(one)
    assert not record_of(one).is_canonical
    assert not record_of(other).is_canonical
    assert len(hits) == 2

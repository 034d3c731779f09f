"""A half-loaded optimizer is neither stepped nor saved (F14)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases import Case
from tests.phases import Phases
from vime_optim.commit import loading
from vime_optim.errors import OptimizerStateError
from vime_optim.fixes import half_loaded
from vime_optim.fixes.sharding import ShardedOptimizerState
from vime_optim.registry import around


class Optimizer:
    def step_with_ready_grads(self) -> str:
        return "stepped"

    def sharded_state_dict(self, model: Any, is_loading: bool = False) -> str:
        return "saved"

    def load_state_dict(self, state: Any) -> None: ...


class Chain:
    def __init__(self, *members: Optimizer) -> None:
        self.chained_optimizers = list(members)


STEP, SAVE, TAKE = (
    around(body)(method, lambda: None)
    for body, method in (
        (half_loaded._step, Optimizer.step_with_ready_grads),
        (half_loaded._sharded_state_dict, Optimizer.sharded_state_dict),
        (half_loaded._load_state_dict, Optimizer.load_state_dict),
    )
)


def load(*optimizers: Optimizer, begins: bool, fails: bool) -> None:
    template = ShardedOptimizerState()
    template.owner = Chain(*optimizers)
    call = {"sharded_state_dict": {"deep": [{"optimizer": template}]}, "checkpoint_dir": "here"}
    with half_loaded.until_taken(call, None):
        if begins:
            loading.reading_begins()
        if fails:
            raise LookupError("the disk is gone")


def test_from_the_first_byte_until_all_is_taken() -> None:
    one, other, outside = Optimizer(), Optimizer(), Optimizer()
    with pytest.raises(LookupError):
        load(one, other, begins=True, fails=True)
    with pytest.raises(OptimizerStateError, match="cannot be stepped"):
        STEP(one)
    with pytest.raises(OptimizerStateError, match="cannot be saved"):
        SAVE(Chain(outside, other), {})
    assert SAVE(one, {}, is_loading=True) == "saved", "a template to load into is no save"
    assert STEP(outside) == "stepped"
    TAKE(one, {})
    assert STEP(one) == "stepped"
    with pytest.raises(OptimizerStateError, match="was not finished"):
        STEP(other)


def test_a_load_that_read_nothing_leaves_the_optimizer_whole() -> None:
    one = Optimizer()
    with pytest.raises(LookupError):
        load(one, begins=False, fails=True)
    assert STEP(one) == "stepped"
    load(one, begins=True, fails=False)
    with pytest.raises(OptimizerStateError, match="cannot be stepped"):
        STEP(one)  # its result was thrown away


def test_a_stage_that_leaves_its_optimizer_out_starts_anew(phases: Phases) -> None:
    """As on stock, and also where a template was asked for, which fills stock's with garbage."""
    case = Case.parse("0.16.1,fused,nopao,dp=1,pp=2,dp_reshardable")
    phases.run("vime_optim.verify.job:save", case)
    for name, install, asked in (
        ("stock", False, False),
        ("left out", True, False),
        ("asked and left out", True, True),
    ):
        phases.run(
            "tests.fixes.left_out_job:resume",
            case.replace(install=install),
            loading=True,
            asked=asked,
            name=name,
        )
    for name in ("left out", "asked and left out"):
        found = phases.differences("stock", name)
        # One stage goes on at step 3 and the other starts: layers of one name are at two steps.
        assert [each for each in found if "replicas disagree" not in each] == []

"""Slots, steps and inert state on real optimizers, without Megatron."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vime_optim.errors import CheckpointError, OptimizerStateError
from vime_optim.optimizer import slots
from vime_optim.optimizer.fresh_state import _ensure
from vime_optim.optimizer.groups_only import GroupsOnly, clean_group, load_groups
from vime_optim.optimizer.slots import RemainderSlot, Slot
from vime_optim.optimizer.steps import read_step, write_step
from vime_optim.optimizer.stock_state import _remainders


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.detach().view(torch.int32).tolist()


class FakeFused:
    """Just enough of FusedAdam for a RemainderSlot: a state with int16 remainders."""

    def __init__(self, param: torch.Tensor) -> None:
        self.state = {param: {"master_param": torch.zeros(param.numel(), dtype=torch.int16)}}


floats = st.integers(0, 2**32 - 1).map(lambda b: b - 2**32 if b >= 2**31 else b)


@given(st.lists(floats, min_size=1, max_size=50))
@settings(max_examples=300, deadline=None)
def test_a_master_goes_through_remainders_bit_for_bit(patterns: list[int]) -> None:
    """Any float32 whose bfloat16 parameter is rounded as the coding rounds comes back exactly."""
    value = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    param = torch.zeros(len(patterns), dtype=torch.bfloat16)
    slot = RemainderSlot(FakeFused(param), param)
    slot.write(value)  # sets the parameter too
    # A tie between two parameters stays exact as well where the parameter is the upper one; from
    # zeros only the pattern 0x00008000 finds the lower one in place.
    tied = torch.tensor([p & 0xFFFFFFFF == 0x00008000 for p in patterns])
    expected = torch.where(tied, torch.tensor(0x7FFF), value.view(torch.int32))
    assert bits(slot.read()) == expected.tolist()


def test_a_tied_master_keeps_its_parameter_and_loses_one_unit() -> None:
    tie = torch.tensor([0x3F808000, 0x3F818000], dtype=torch.int32).view(torch.float32)
    param = tie.to(torch.bfloat16)  # half to even: 0x3F80 and 0x3F82
    kept = param.clone()
    slot = RemainderSlot(FakeFused(param), param)
    assert not slot.write_and_compare(tie)
    assert torch.equal(param.view(torch.int16), kept.view(torch.int16))
    assert bits(slot.read()) == [0x3F807FFF, 0x3F818000]


def test_parameters_that_do_not_belong_to_their_masters_are_set() -> None:
    master = torch.randn(100)
    param = torch.zeros(100, dtype=torch.bfloat16)
    slot = RemainderSlot(FakeFused(param), param)
    assert slot.write_and_compare(master)
    assert bits(slot.read()) == bits(master)


def test_masters_are_coded_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporaries stay small; the first block has nothing to report, the last one does."""
    monkeypatch.setattr(slots, "_BLOCK_NUMEL", 32)
    master = torch.randn(100)
    param = torch.zeros(100, dtype=torch.bfloat16)
    slot = RemainderSlot(FakeFused(param), param)
    slot.write(master)
    assert bits(slot.read()) == bits(master)
    assert not slot.write_and_compare(master)
    param[99] += 1
    assert slot.write_and_compare(master)
    assert bits(slot.read()) == bits(master)


def test_a_mirror_follows_its_slot() -> None:
    first, mirror = torch.zeros(4), torch.ones(4)
    slot = Slot("param", first, (mirror,))
    slot.write(torch.arange(4.0))
    assert torch.equal(mirror, torch.arange(4.0))
    direct = slot.direct()
    assert direct is not None
    direct.fill_(7)
    slot.settle()
    assert torch.equal(mirror, torch.full((4,), 7.0))


def native(fused: bool, kind: type = torch.optim.AdamW) -> Any:
    torch.manual_seed(0)
    groups = [
        {"params": [torch.nn.Parameter(torch.randn(5)), torch.nn.Parameter(torch.randn(3))]},
        {"params": [torch.nn.Parameter(torch.randn(7))], "lr": 0.5},
    ]
    return kind(groups, lr=0.1, fused=fused)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_inert_state_is_what_the_first_step_starts_from(fused: bool, kind: type) -> None:
    """State made inertly, then stepped, equals an optimizer that was only stepped, bit for bit."""
    prepared, plain = native(fused, kind), native(fused, kind)
    rng = torch.get_rng_state()
    before = [p.detach().clone() for g in prepared.param_groups for p in g["params"]]
    _ensure(prepared, None, None)
    assert torch.equal(torch.get_rng_state(), rng)
    after = [p for g in prepared.param_groups for p in g["params"]]
    assert all(bits(a) == bits(b) for a, b in zip(before, after, strict=True))
    assert all(p.grad is None for p in after)
    assert read_step(prepared) == 0
    for optimizer in (prepared, plain):
        torch.manual_seed(1)
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.randn_like(param)
        optimizer.step()
    for group, other in zip(prepared.param_groups, plain.param_groups, strict=True):
        for a, b in zip(group["params"], other["params"], strict=True):
            assert bits(a) == bits(b)
            state, expected = prepared.state[a], plain.state[b]
            assert state.keys() == expected.keys()
            for name in state:
                assert state[name].dtype == expected[name].dtype
                assert state[name].device == expected[name].device
                assert bits(state[name].reshape(-1)) == bits(expected[name].reshape(-1))


@pytest.mark.parametrize("fused", [False, True])
def test_steps_are_written_apart(fused: bool) -> None:
    optimizer = native(fused)
    _ensure(optimizer, None, None)
    shared = torch.tensor(3.0)
    for state in optimizer.state.values():
        state["step"] = shared
    write_step(optimizer, 41)
    assert read_step(optimizer) == 41
    pointers = {state["step"].data_ptr() for state in optimizer.state.values()}
    assert len(pointers) == 3
    first = next(iter(optimizer.state.values()))
    first["exp_avg"].fill_(1.0)
    first["step"] += 1
    assert read_step(optimizer) == 42, "counters of parameters that were never stepped say nothing"
    for state in optimizer.state.values():
        state["exp_avg"].fill_(1.0)
    with pytest.raises(OptimizerStateError, match="disagree"):
        read_step(optimizer)


@pytest.mark.parametrize("first", [float("nan"), float("inf"), -float("inf"), 0.5])
def test_what_is_no_whole_number_is_no_remainder(first: float) -> None:
    """Remainders written in place of masters (F7) are whole numbers; a master may be anything."""
    assert _remainders(torch.tensor([first, 2.0])) is None
    assert _remainders(torch.tensor([-3.0, 2.0])).tolist() == [-3, 2]


def test_groups_travel_without_tensors() -> None:
    optimizer = native(False)
    _ensure(optimizer, None, None)
    write_step(optimizer, 2)
    proxy = GroupsOnly(optimizer)
    assert isinstance(proxy, torch.optim.AdamW)
    packed = proxy.state_dict()
    assert [set(state) for state in packed["state"].values()] == [{"step"}]
    saved = copy.deepcopy(packed["param_groups"])
    saved[1]["lr"] = 0.25
    saved[0]["cpu_optimizer_cls"] = torch.optim.SGD
    own = [id(p) for g in optimizer.param_groups for p in g["params"]]
    proxy.load_state_dict({"state": {}, "param_groups": saved})
    assert math.isclose(optimizer.param_groups[1]["lr"], 0.25, rel_tol=0, abs_tol=0)
    assert "cpu_optimizer_cls" not in optimizer.param_groups[0]
    assert own == [id(p) for g in optimizer.param_groups for p in g["params"]]
    with pytest.raises(CheckpointError, match="param groups"):
        load_groups(optimizer, saved[:1])
    assert clean_group({"x": int, "lr": 1}) == {"lr": 1}


@pytest.mark.parametrize("fused", [False, True])
def test_how_an_optimizer_computes_is_its_own_choice(fused: bool) -> None:
    """CPU offload saves fused=True; torch's Adam on the device must not start to compute so."""
    source, target = native(not fused), native(fused)
    saved = copy.deepcopy(GroupsOnly(source).state_dict()["param_groups"])
    for group in saved:
        group.update(capturable=True, foreach=True, differentiable=True, lr=0.75)
    del target.param_groups[1]["foreach"]
    GroupsOnly(target).load_state_dict({"state": {}, "param_groups": saved})
    for group in target.param_groups:
        assert group["lr"] == 0.75
        assert group["fused"] is fused
        assert not any(group.get(key) for key in ("capturable", "foreach", "differentiable"))
    assert "foreach" not in target.param_groups[1]

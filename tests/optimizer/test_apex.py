"""NVIDIA Apex's FusedAdam: the stand-in, and what is restored into it.

That the real one is as the stand-in is compared in tests/gpu/test_real_apex.py.
"""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.cases import Case
from tests.phases import Phases
from tests.simulate import apex_adam
from tests.simulate.apex import MODULES
from tests.simulate.apex_adam import FusedAdam
from vime_optim.errors import OptimizerStateError, SettingsError
from vime_optim.optimizer.fresh_state import _ensure
from vime_optim.optimizer.groups_only import GroupsOnly
from vime_optim.optimizer.kinds import is_apex, is_native, is_transformer_engine
from vime_optim.optimizer.soundness import _check_groups
from vime_optim.optimizer.steps import read_step, steps_as_numbers, write_step
from vime_optim.simulate import device
from vime_optim.simulate import fused_adam as te
from vime_optim.simulate.megatron import hide_modules, show_modules
from vime_optim.tools.bits import same_bits


@pytest.fixture(autouse=True)
def simulated() -> Iterator[None]:
    device.enable()
    yield
    device.disable()


class Derived(FusedAdam):
    """A user's subclass, in a module of theirs."""


def _copied() -> Any:
    """A copy of the class in another module: nothing tells that it is Apex's."""
    source = inspect.getsource(apex_adam)
    assert "MODULE = " in source
    names = {"__name__": "fork.adam"}
    exec(
        source.replace(f"MODULE = {apex_adam.MODULE!r}".replace("'", '"'), "MODULE = __name__"),
        names,
    )
    return names["FusedAdam"]


Copied = _copied()


def make(kind: Any = FusedAdam, **options: Any) -> Any:
    torch.manual_seed(0)
    groups: list[dict[str, Any]] = [
        {"params": [torch.nn.Parameter(torch.randn(5)), torch.nn.Parameter(torch.randn(3))]},
        {"params": []},
        {"params": [torch.nn.Parameter(torch.randn(7))], "lr": 0.5},
        {"params": []},
    ]
    return kind(groups, lr=0.125, **options)


def params(optimizer: Any) -> list[torch.nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def train(optimizer: Any, seed: int) -> None:
    torch.manual_seed(seed)
    for param in params(optimizer):
        param.grad = torch.randn_like(param)
    optimizer.step()


def test_the_stand_in_is_told_apart() -> None:
    for kind in (FusedAdam, Derived):
        assert is_apex(make(kind))
        assert not is_transformer_engine(make(kind))
        assert not is_native(make(kind))
    assert not is_apex(make(Copied))
    assert not is_apex(te.FusedAdam([torch.nn.Parameter(torch.zeros(2))]))
    sgd = type("FusedSGD", (torch.optim.SGD,), {"__module__": "apex.optimizers.fused_sgd"})
    assert not is_apex(make(sgd))


def test_pickle_finds_the_stand_in_where_apex_is_shown() -> None:
    show_modules(FusedAdam, MODULES)
    try:
        assert pickle.loads(pickle.dumps(FusedAdam)) is FusedAdam
        with pytest.raises(ImportError):
            exec("from apex.multi_tensor_apply import multi_tensor_applier")
    finally:
        hide_modules()
    with pytest.raises(ImportError):
        exec("import apex.optimizers.fused_adam")


def test_states_and_steps_of_the_stand_in() -> None:
    optimizer = make()
    first, second, third = params(optimizer)
    for param in (first, third):
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.step()
    assert [group.get("step") for group in optimizer.param_groups] == [2, None, 2, None]
    assert set(optimizer.state) == {first, third}, "a parameter without gradient has no state"
    assert {name: v.dtype for name, v in optimizer.state[first].items()} == {
        "exp_avg": torch.float32,
        "exp_avg_sq": torch.float32,
    }
    optimizer.zero_grad()
    assert first.grad is second.grad is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_moments_of_16_bit_parameters_are_float32(dtype: torch.dtype) -> None:
    for made_inert in (False, True):
        param = torch.nn.Parameter(torch.ones(4, dtype=dtype))
        optimizer = FusedAdam([param])
        if made_inert:
            _ensure(optimizer, None, None)
        param.grad = torch.ones_like(param)
        optimizer.step()
        assert {value.dtype for value in optimizer.state[param].values()} == {torch.float32}


def test_what_the_stand_in_refuses() -> None:
    param = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(RuntimeError, match="AMSGrad"):
        FusedAdam([param], amsgrad=True)
    with pytest.raises(RuntimeError, match="capturable"):
        FusedAdam([param], master_weights=True)
    with pytest.raises(SettingsError, match="master weights"):
        FusedAdam([param], master_weights=True, capturable=True)
    for name in ("grads", "output_params", "scale", "grad_norms"):
        with pytest.raises(RuntimeError, match="updated"):
            FusedAdam([param]).step(**{name: 1})


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("kind", [FusedAdam, Derived, Copied])
def test_inert_state_is_what_the_first_step_starts_from(kind: Any, capturable: bool) -> None:
    prepared, plain = make(kind, capturable=capturable), make(kind, capturable=capturable)
    rng = torch.get_rng_state()
    _ensure(prepared, None, None)
    assert torch.equal(torch.get_rng_state(), rng)
    assert read_step(prepared) is None
    assert all(param.grad is None for param in params(prepared))
    for optimizer in (prepared, plain):
        train(optimizer, 1)
    assert_same(prepared, plain)


@pytest.mark.parametrize("kind", [FusedAdam, Copied])
def test_state_that_exists_stays_as_it_is(kind: Any) -> None:
    optimizer = make(kind, capturable=True)
    first, second, third = params(optimizer)
    first.grad = torch.randn_like(first)
    optimizer.step()
    before = copy.deepcopy([optimizer.state[first], [p.detach() for p in params(optimizer)]])
    _ensure(optimizer, None, None)
    after = [optimizer.state[first], [p.detach() for p in params(optimizer)]]
    assert all(same_bits(after[0][name], value) for name, value in before[0].items())
    assert all(same_bits(a, b) for a, b in zip(after[1], before[1], strict=True))
    assert [int(g["step"]) for g in optimizer.param_groups if "step" in g] == [1, 1]
    assert not any(optimizer.state[p]["exp_avg"].count_nonzero() for p in (second, third))


def assert_same(one: Any, other: Any) -> None:
    """Parameters, states, and param groups with the kinds of their values."""
    for a, b in zip(params(one), params(other), strict=True):
        assert same_bits(a, b)
        assert one.state[a].keys() == other.state[b].keys()
        for name, value in one.state[a].items():
            assert value.dtype == other.state[b][name].dtype
            assert same_bits(value, other.state[b][name])
    for group, expected in zip(one.param_groups, other.param_groups, strict=True):
        assert group.keys() == expected.keys()
        for key in group.keys() - {"params"}:
            assert type(group[key]) is type(expected[key]), key
            assert getattr(group[key], "dtype", None) == getattr(expected[key], "dtype", None)
            assert getattr(group[key], "shape", None) == getattr(expected[key], "shape", None)
            assert group[key] == expected[key], key


def storages(optimizer: Any) -> list[int]:
    """Of the steps and learning rates that are tensors, without those of empty groups."""
    return [
        group[key].data_ptr()
        for group in optimizer.param_groups
        for key in ("step", "lr")
        if group["params"] and isinstance(group.get(key), torch.Tensor)
    ]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("here", [False, True])
@pytest.mark.parametrize("there", [False, True])
def test_groups_and_steps_come_back_in_this_optimizers_kinds(
    there: bool, here: bool, trained: bool
) -> None:
    """Numbers, or with capturable tensors of each group's own, whatever the saved ones are."""
    source, target, plain = (make(capturable=c) for c in (there, here, here))
    train(source, 1)
    if trained:
        train(target, 2)
        train(target, 3)
    held = storages(target)
    train(plain, 1)
    saved = copy.deepcopy(GroupsOnly(source).state_dict()["param_groups"])
    pointers = {value.data_ptr() for value in saved[0].values() if isinstance(value, torch.Tensor)}

    _ensure(target, None, None)
    GroupsOnly(target).load_state_dict({"state": {}, "param_groups": saved})
    write_step(target, 1)
    with torch.no_grad():
        for own, other in zip(params(target), params(source), strict=True):
            own.copy_(other)
            for name, value in source.state[other].items():
                target.state[own][name].copy_(value)

    assert_same(target, plain)
    assert len(set(storages(target))) == len(storages(target)) == (4 if here else 0)
    assert not pointers & set(storages(target))
    if trained:
        assert storages(target) == held, "a CUDA graph may hold on to a tensor of before"
    for optimizer in (target, plain):
        train(optimizer, 4)
    assert_same(target, plain)


def test_what_is_saved_does_not_change_with_the_optimizer() -> None:
    optimizer = make(capturable=True)
    train(optimizer, 1)
    saved = GroupsOnly(optimizer).state_dict()["param_groups"]
    for group in optimizer.param_groups:
        group["lr"].fill_(3.0)
    train(optimizer, 2)
    assert [group.get("step") for group in saved] == [1, None, 1, None]
    assert [float(group["lr"]) for group in saved] == [0.125, 0.125, 0.5, 0.125]


def test_a_shared_step_is_parted() -> None:
    """Megatron's alignment of steps gives all groups one tensor."""
    optimizer = make(capturable=True)
    shared = torch.tensor([5], dtype=torch.int)
    for group in optimizer.param_groups:
        if group["params"]:
            group["step"] = shared
    with pytest.raises(OptimizerStateError, match="share one tensor"):
        _check_groups(optimizer)
    write_step(optimizer, 7)
    _check_groups(optimizer)
    train(optimizer, 1)
    assert [int(g["step"]) for g in optimizer.param_groups if "step" in g] == [8, 8]


def test_steps_as_numbers() -> None:
    first, second = torch.tensor([3], dtype=torch.int), torch.tensor([3], dtype=torch.int)
    groups: list[dict[str, Any]] = [{"step": first}, {"step": second}, {"step": 3}, {}]
    with steps_as_numbers(groups):
        assert groups == [{"step": 3}, {"step": 3}, {"step": 3}, {}]
        groups[1]["step"] = 4
    assert groups[0]["step"] is first
    assert groups[1]["step"] is second
    assert [int(first), int(second)] == [3, 4]


@pytest.mark.parametrize("capturable", [False, True])
def test_before_the_first_step_there_is_no_counter(capturable: bool) -> None:
    optimizer = make(capturable=capturable)
    train(optimizer, 1)
    write_step(optimizer, 0)
    assert read_step(optimizer) is None
    assert not any("step" in group for group in optimizer.param_groups)


APEX = "fused,apex,nopao"
TRAINED = (
    f"0.16.1,{APEX},dp=3,bucket=40,groups=both",
    f"0.19.2,{APEX},capturable,dp=3,bucket=40,groups=both",
    "0.19.2,hybrid,apex,pao,f=0.5,dp=2,dp_reshardable",
    f"0.15.3,{APEX},dp=2,dp_reshardable",
    f"0.16.1,{APEX},dp=2,steps=0",
    f"0.17.1,{APEX},capturable,dp=2,steps=0,dp_reshardable",
    f"0.18.2,{APEX},capturable,dp=3,bucket=40,groups=both,dp_reshardable",
    "0.18.2,hybrid,apex,nopao,f=0.25,dp=2",
)


@pytest.mark.parametrize(
    "words",
    [pytest.param(w, marks=() if w in TRAINED[:1] else pytest.mark.matrix) for w in TRAINED],
)
def test_a_trained_optimizer_takes_a_checkpoint(words: str, phases: Phases) -> None:
    """Every group included: one that is empty on a rank has no step there, before and after."""
    case = Case.parse(words)
    saved = phases.run("tests.optimizer.apex_job:save", case)
    resumed = phases.run("tests.optimizer.apex_job:resume_trained", case)
    assert phases.differences("after_save", "resumed") == []
    assert not any(answer["memory"]["aliased"] for answer in resumed)
    for before, after in zip(saved, resumed, strict=True):
        assert before["groups"] == after["groups"]
    groups = [SimpleNamespace(**{"step": None, **g}) for answer in saved for g in answer["groups"]]
    if "bucket=40" in words:
        assert {g.step is None for g in groups if not g.params} == {True}
    kind = "torch.int32 (1,)" if case.backend.capturable else "int"
    assert {g.step[0] for g in groups if g.step} == {kind}

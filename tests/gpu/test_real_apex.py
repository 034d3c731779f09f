"""The stand-in for NVIDIA Apex's FusedAdam in the simulation beside Apex's own, on a GPU.

Apex is on no package registry: where it was not built from its source, these tests skip.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import resident as gpu
import torch

from vime_optim.optimizer.kinds import is_apex, is_transformer_engine

pytestmark = pytest.mark.gpu

BETAS = (0.5, 0.75)  # with gradients that are small integers, moments are exact in any order
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _needs_apex() -> None:
    if gpu.REHEARSE:
        pytest.skip("apex: the rehearsal has none to compare with")
    if reason := gpu.missing_devices(1):
        pytest.skip(f"gpu: {reason}")
    if reason := gpu.missing_apex():
        pytest.skip(reason)


@functools.cache
def _classes() -> tuple[Any, Any]:
    from apex.optimizers import FusedAdam as Real

    from tests.simulate.apex_adam import FusedAdam as StandIn

    return Real, StandIn


def _pair(dtype: torch.dtype = torch.float32, **options: Any) -> list[Any]:
    """The real optimizer on the GPU and the stand-in on the host, with equal parameters.

    Three groups: two parameters, none, and one.
    """
    made = []
    for kind, device in zip(_classes(), ("cuda", "cpu"), strict=True):
        torch.manual_seed(3)
        first, second, third = (torch.randn(n).to(dtype).to(device) for n in (1000, 7, 33))
        groups: list[dict[str, Any]] = [
            {"params": [torch.nn.Parameter(first), torch.nn.Parameter(second)]},
            {"params": []},
            {"params": [torch.nn.Parameter(third)], "weight_decay": 0.0},
        ]
        made.append(kind(groups, **{"lr": 0.0, "betas": BETAS, **options}))
    return made


def _params(optimizer: Any) -> list[torch.nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _step(optimizer: Any, seed: int, *, integers: bool = True, without: int | None = None) -> None:
    generator = torch.Generator().manual_seed(seed)
    for index, param in enumerate(_params(optimizer)):
        if integers:
            value = torch.randint(1, 9, param.shape, generator=generator).float()
        else:
            value = torch.randn(param.shape, generator=generator)
        param.grad = None if index == without else value.to(param)
    optimizer.step()


def _kind(value: Any, home: str) -> Any:
    """A number's type; of a tensor the dtype, shape, and whether it is where the parameters are."""
    if not isinstance(value, torch.Tensor):
        return type(value)
    return value.dtype, tuple(value.shape), value.device.type == home


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(torch.uint8)


def test_the_real_one_is_told_apart() -> None:
    real, _ = _pair()
    assert is_apex(real)
    assert not is_transformer_engine(real)
    assert type(real).__module__ == _classes()[1].__module__
    for name in ("use_decoupled_grad", "initialize_state", "set_scaled_state"):
        assert not hasattr(real, name)


def test_the_same_arguments() -> None:
    for name in ("__init__", "step"):
        real, fake = (inspect.signature(getattr(kind, name)).parameters for kind in _classes())
        assert list(real) == list(fake)
        assert {n: p.default for n, p in real.items()} == {n: p.default for n, p in fake.items()}


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_states_and_groups_look_the_same(dtype: torch.dtype, capturable: bool) -> None:
    real, fake = _pair(dtype, capturable=capturable)
    for steps in (0, 1, 2):
        for group, own in zip(real.param_groups, fake.param_groups, strict=True):
            assert group.keys() == own.keys()
            for key in group.keys() - {"params"}:
                if group["params"] or key != "lr":
                    assert _kind(group[key], "cuda") == _kind(own[key], "cpu"), (key, steps)
        for param, own in zip(_params(real), _params(fake), strict=True):
            there, here = real.state.get(param, {}), fake.state.get(own, {})
            assert there.keys() == here.keys()
            assert {n: _kind(v, "cuda") for n, v in there.items()} == {
                n: _kind(v, "cpu") for n, v in here.items()
            }
        for optimizer in (real, fake):
            _step(optimizer, steps, without=1)


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("adam_w_mode", [False, True])
def test_bits_are_the_same_where_the_arithmetic_is(
    dtype: torch.dtype, capturable: bool, adam_w_mode: bool
) -> None:
    """Moments of integers and lr=0: no rounding that the order of operations could change."""
    real, fake = _pair(dtype, capturable=capturable, adam_w_mode=adam_w_mode)
    for seed in (1, 2):
        _step(real, seed)
        _step(fake, seed)
    for param, own in zip(_params(real), _params(fake), strict=True):
        assert torch.equal(_bits(param), _bits(own))
        for name, value in real.state[param].items():
            assert torch.equal(_bits(value), _bits(fake.state[own][name])), name


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("adam_w_mode", [False, True])
def test_a_real_step_agrees_to_rounding(adam_w_mode: bool, capturable: bool) -> None:
    real, fake = _pair(
        lr=0.01, betas=(0.9, 0.999), weight_decay=0.05, adam_w_mode=adam_w_mode,
        capturable=capturable,
    )  # fmt: skip
    for seed in (1, 2, 3):
        _step(real, seed, integers=False)
        _step(fake, seed, integers=False)
    for param, own in zip(_params(real), _params(fake), strict=True):
        # Not a resume test: the GPU fuses multiplications and additions.
        torch.testing.assert_close(param.cpu(), own, rtol=1e-4, atol=1e-6)
        for name, value in real.state[param].items():
            torch.testing.assert_close(value.cpu(), fake.state[own][name], rtol=1e-5, atol=1e-7)


def test_the_same_errors() -> None:
    for kind, device in zip(_classes(), ("cuda", "cpu"), strict=True):
        param = torch.nn.Parameter(torch.ones(4, device=device))
        with pytest.raises(RuntimeError, match="AMSGrad"):
            kind([param], amsgrad=True)
        with pytest.raises(RuntimeError, match="capturable"):
            kind([param], master_weights=True)
        with pytest.raises(TypeError):
            kind([param], exp_avg_dtype=torch.float32)
        for name in ("grads", "output_params", "scale", "grad_norms"):
            with pytest.raises(RuntimeError):
                kind([param]).step(**{name: 1})


@pytest.mark.parametrize("dtype", DTYPES)
def test_state_dicts_go_from_one_to_the_other(dtype: torch.dtype) -> None:
    """With the dtypes that torch's load_state_dict gives the moments of 16-bit parameters."""
    real, fake = _pair(dtype)
    _step(real, 1)
    _step(fake, 1)
    kinds = []
    for source, target in ((real, fake), (fake, real)):
        target.load_state_dict(source.state_dict())
        kinds.append([{n: v.dtype for n, v in target.state[p].items()} for p in _params(target)])
        assert [group.get("step") for group in target.param_groups] == [1, None, 1]
    assert kinds[0] == kinds[1]

"""The FusedAdam stand-in of the simulation beside Transformer Engine's own, on a GPU."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import resident as gpu
import torch

pytestmark = pytest.mark.gpu

BETAS = (0.5, 0.75)  # with gradients that are small integers, moments are exact in any order
KINDS = {
    "fp32": {},
    "no master": {"master_weights": False},
    "remainders": {"store_param_remainders": True},
    "bf16": {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
    "fp16": {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16},
    "fp8": {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8},
}


@pytest.fixture(autouse=True)
def _needs_transformer_engine() -> None:
    if gpu.REHEARSE:
        pytest.skip("transformer-engine: the rehearsal has none to compare with")
    reason = gpu.missing_devices(1)
    if reason:
        pytest.skip(reason)
    pytest.importorskip(
        "transformer_engine.pytorch", reason="transformer-engine: it is not installed"
    )


@functools.cache
def _classes() -> tuple[type, type]:
    from transformer_engine.pytorch.optimizers import FusedAdam as Real

    from vime_optim.simulate.fused_adam import FusedAdam as StandIn

    return Real, StandIn


def _pair(kind: str, **changes: Any) -> list[tuple[Any, torch.nn.Parameter]]:
    """The real optimizer on the GPU and the stand-in on the host, with the same parameter."""
    options: dict[str, Any] = {
        "lr": 0.0,
        "betas": BETAS,
        "master_weights": True,
        "use_decoupled_grad": True,
        **KINDS[kind],
        **changes,
    }
    values = torch.randn(1000, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    made = []
    for kind_class, device in zip(_classes(), ("cuda", "cpu"), strict=True):
        param = torch.nn.Parameter(values.clone().to(device))
        made.append((kind_class([param], **options), param))
    return made


def _step(optimizer: Any, param: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    param.decoupled_grad = gradient.to(param.device)  # type: ignore[attr-defined]
    optimizer.step()


def _integers(seed: int) -> torch.Tensor:
    return torch.randint(1, 9, (1000,), generator=torch.Generator().manual_seed(seed)).float()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The stored codes, on the host."""
    coded = getattr(tensor, "_data", tensor).detach().cpu().contiguous()
    return coded.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[coded.element_size()])


@pytest.mark.parametrize("kind", KINDS)
def test_states_look_the_same(kind: str) -> None:
    (real, real_param), (fake, fake_param) = _pair(kind)
    for optimizer, param in ((real, real_param), (fake, fake_param)):
        _step(optimizer, param, _integers(1))
    there, here = real.state[real_param], fake.state[fake_param]
    assert set(there) == set(here)
    for name, value in there.items():
        assert value.shape == here[name].shape
        assert value.dtype == here[name].dtype
        assert _bits(value).dtype == _bits(here[name]).dtype
    scales, own_scales = real._scales.get(real_param, {}), fake._scales.get(fake_param, {})
    assert set(scales) == set(own_scales)
    for name, value in scales.items():
        assert (value.shape, value.dtype) == (own_scales[name].shape, own_scales[name].dtype)
    assert real.param_groups[0].keys() == fake.param_groups[0].keys()
    assert type(real.param_groups[0]["step"]) is type(fake.param_groups[0]["step"])
    saved, own_saved = real.state_dict(), fake.state_dict()
    for name, value in saved["state"][0].items():
        assert value.dtype == own_saved["state"][0][name].dtype


@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_the_same_where_the_arithmetic_is(kind: str) -> None:
    """Moments of integers and lr=0: no rounding that the order of operations could change."""
    (real, real_param), (fake, fake_param) = _pair(kind)
    for seed in (1, 2):
        _step(real, real_param, _integers(seed))
        _step(fake, fake_param, _integers(seed))
    assert torch.equal(_bits(real_param), _bits(fake_param))
    for name, value in real.state[real_param].items():
        assert torch.equal(_bits(value), _bits(fake.state[fake_param][name])), name
    for name, value in real._scales.get(real_param, {}).items():
        assert torch.equal(_bits(value), _bits(fake._scales[fake_param][name])), name


@pytest.mark.parametrize("kind", ["fp32", "remainders"])
def test_a_real_step_agrees_to_rounding(kind: str) -> None:
    (real, real_param), (fake, fake_param) = _pair(kind, lr=0.01, betas=(0.9, 0.999))
    for seed in (1, 2, 3):
        gradient = torch.randn(1000, generator=torch.Generator().manual_seed(seed))
        _step(real, real_param, gradient)
        _step(fake, fake_param, gradient)
    for name in ("exp_avg", "exp_avg_sq"):
        there, here = real.state[real_param][name].cpu(), fake.state[fake_param][name]
        # Not a resume test: the GPU fuses multiplications and additions.
        torch.testing.assert_close(there, here, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(real_param.cpu(), fake_param, rtol=1e-2, atol=1e-4)


def test_the_same_errors() -> None:
    for optimizer, param in _pair("remainders"):
        _step(optimizer, param, _integers(1))
        with pytest.raises(AttributeError, match="'bool' object has no attribute 'dtype'"):
            optimizer.set_scaled_state(param, "padding", True)
        with pytest.raises(AssertionError):
            optimizer.set_scaled_state(param, "master_param", torch.zeros_like(param).float())


@pytest.mark.parametrize("kind", ["fp16", "fp8"])
def test_all_zero_gradients(kind: str) -> None:
    """What becomes of a state that is all zero: NaN or zero, the same in both."""
    outcomes = []
    for optimizer, param in _pair(kind):
        _step(optimizer, param, torch.zeros(1000))
        values = optimizer.get_unscaled_state(param, "exp_avg")
        outcomes.append("NaN" if bool(values.isnan().any()) else f"{float(values.abs().max())}")
    print(f"all-zero {kind}: real {outcomes[0]}, stand-in {outcomes[1]}")
    assert outcomes[0] == outcomes[1]
    assert not math.isinf(float(outcomes[0]))

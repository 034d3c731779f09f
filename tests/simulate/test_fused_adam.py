"""The stand-in for Transformer Engine's FusedAdam."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from vime_optim.errors import SettingsError
from vime_optim.simulate import device
from vime_optim.simulate.fused_adam import FusedAdam, master_from_remainder, split_master


@pytest.fixture(autouse=True)
def simulated() -> Iterator[None]:
    device.enable()
    yield
    device.disable()


def test_remainder_coding_is_exact() -> None:
    edges = [0x7FFF, 0x8000, 0xFFFF, 0, 1, 0x3F80_8000, 0x7F7F_FFFF]
    bits = torch.randint(-(2**31), 2**31 - 1, (20000,), dtype=torch.int64)
    bits = torch.cat([bits, torch.tensor(edges)]).to(torch.int32)
    master = bits.view(torch.float32)
    master = master[torch.isfinite(master)]
    param, remainder = split_master(master)
    assert (param.dtype, remainder.dtype) == (torch.bfloat16, torch.int16)
    rebuilt = master_from_remainder(param, remainder)
    assert torch.equal(rebuilt.view(torch.int32), master.view(torch.int32))
    # Formula of the TE kernels, in Python integers.
    for value, p, r in zip(
        master.view(torch.int32)[-50:].tolist(),
        param.view(torch.int16)[-50:].tolist(),
        remainder[-50:].tolist(),
        strict=True,
    ):
        assert (((p - (r < 0)) << 16) | (r & 0xFFFF)) & 0xFFFFFFFF == value & 0xFFFFFFFF


def _stepped(adam: Any, steps: int = 4) -> torch.nn.Parameter:
    param = adam.param_groups[0]["params"][0]
    for step in range(steps):
        gradient = torch.randn(param.shape, generator=torch.Generator().manual_seed(step)).cuda()
        param.grad = gradient.to(param.dtype)
        param.decoupled_grad = gradient
        adam.step()
    return param


def _param(dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    values = torch.randn(64, generator=torch.Generator().manual_seed(9))
    return torch.nn.Parameter(values.to(dtype).cuda())


def test_plain_adam_agrees_with_torch_to_rounding() -> None:
    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
    for decoupled, reference in ((True, torch.optim.AdamW), (False, torch.optim.Adam)):
        ours = _stepped(FusedAdam([_param()], adam_w_mode=decoupled, **options))
        theirs = _stepped(reference([_param()], foreach=False, **options))
        # Not a resume test: two orders of the same fp32 operations.
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_remainders_lose_nothing() -> None:
    options: dict[str, Any] = {"master_weights": True, "use_decoupled_grad": True, "lr": 0.01}
    whole = FusedAdam([_param(torch.bfloat16)], **options)
    split = FusedAdam([_param(torch.bfloat16)], store_param_remainders=True, **options)
    reference, coded = _stepped(whole), _stepped(split)
    remainder = split.state[coded]["master_param"]
    assert remainder.dtype == torch.int16
    master = whole.state[reference]["master_param"]
    assert torch.equal(master_from_remainder(coded, remainder), master)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_state_dtypes_and_their_round_trip(dtype: torch.dtype) -> None:
    options: dict[str, Any] = {
        "exp_avg_dtype": dtype,
        "exp_avg_sq_dtype": dtype,
        "master_weights": True,
        "use_decoupled_grad": True,
        "master_weight_dtype": torch.float16 if dtype == torch.float16 else torch.float32,
    }
    adam = FusedAdam([_param(torch.bfloat16)], **options)
    param = _stepped(adam)
    held = adam.state[param]["exp_avg"]
    assert held.is_cuda
    assert getattr(held, "_data", held).dtype == dtype
    assert (param in adam._scales) == (dtype != torch.float32)
    assert adam.param_groups[0]["step"] == 4
    saved = adam.state_dict()
    assert {value.dtype for value in saved["state"][0].values()} == {torch.float32}
    fresh = FusedAdam([_param(torch.bfloat16)], **options)
    fresh.load_state_dict(copy.deepcopy(saved))
    restored = fresh.param_groups[0]["params"][0]
    if dtype != torch.uint8:  # coding FP8 again may round the scale
        for name in ("exp_avg", "exp_avg_sq", "master_param"):
            assert torch.equal(
                fresh.get_unscaled_state(restored, name), adam.get_unscaled_state(param, name)
            )


def test_errors_where_transformer_engine_raises_them() -> None:
    adam = FusedAdam([_param(torch.bfloat16)], master_weights=True, store_param_remainders=True)
    param = adam.param_groups[0]["params"][0]
    with pytest.raises(AttributeError, match="'bool' object has no attribute 'dtype'"):
        adam.set_scaled_state(param, "padding", True)  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        adam.set_scaled_state(param, "master_param", torch.zeros(64, device="cuda"))
    with pytest.raises(RuntimeError, match="fp32/fp16 master"):
        FusedAdam([_param()], master_weights=True, master_weight_dtype=torch.bfloat16)
    with pytest.raises(SettingsError):
        FusedAdam([_param()], capturable=True)


def test_an_empty_group_steps_too() -> None:
    adam = FusedAdam([{"params": [_param()]}, {"params": []}])
    _stepped(adam, steps=2)
    assert [group["step"] for group in adam.param_groups] == [2, 2]

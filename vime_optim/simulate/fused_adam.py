"""A stand-in for the FusedAdam of Transformer Engine 2.20.2, in plain torch.

The same arguments, states, dtypes, scaling rules, step counter, and the same errors in the same
places (facts from transformer_engine/pytorch/optimizers/fused_adam.py of 2.20.2). The arithmetic is
that of its multi-tensor kernels, in fp32; bitwise equality with the GPU is not claimed, since the
GPU fuses multiplications and additions. CUDA graphs (capturable=True) and quantized model weights
are not simulated.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch

from vime_optim.errors import SettingsError
from vime_optim.simulate.float8 import E4M3_MAX, Float8Quantizer, Float8Tensor

STATE_NAMES = ("exp_avg", "exp_avg_sq", "master_param")
_MOMENT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)


def master_from_remainder(param: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 master: a bf16 param (rounded up where the remainder is negative) and its low bits.

    Args:
        param: bf16, any shape.
        remainder: int16, the same shape.
    """
    high = param.detach().view(torch.int16).to(torch.int32) - (remainder < 0).to(torch.int32)
    low = remainder.to(torch.int32) & 0xFFFF
    return ((high << 16) | low).view(torch.float32)


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of master_from_remainder: (bf16 param, int16 remainder) of an fp32 master."""
    bits = master.view(torch.int32)
    remainder = (((bits & 0xFFFF) ^ 0x8000) - 0x8000).to(torch.int16)
    high = (bits >> 16) + (remainder < 0).to(torch.int32)
    # 0x7FFF + 1 has to wrap as int16 arithmetic does.
    wrapped = (((high & 0xFFFF) ^ 0x8000) - 0x8000).to(torch.int16)
    return wrapped.view(torch.bfloat16), remainder


class FusedAdam(torch.optim.Optimizer):
    """Adam with states of chosen dtypes. See the module's docstring.

    Args:
        params: parameters or groups.
        master_weights: keep a master copy of 16-bit params in the state `master_param`.
        master_weight_dtype: torch.float32 or torch.float16.
        exp_avg_dtype, exp_avg_sq_dtype: fp32, fp16, bf16, or torch.uint8 for FP8.
        use_decoupled_grad: read `param.decoupled_grad` instead of `param.grad`.
        store_param_remainders: keep of a bf16 param's fp32 master the low 16 bits alone (int16).

    Raises:
        RuntimeError: a combination that Transformer Engine refuses.
        SettingsError: capturable=True, which is not simulated.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter | dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant.")
        if master_weights and master_weight_dtype not in (torch.float32, torch.float16):
            raise RuntimeError("FusedAdam only supports fp32/fp16 master weights.")
        for name, dtype in (("exp_avg", exp_avg_dtype), ("exp_avg_sq", exp_avg_sq_dtype)):
            if dtype not in _MOMENT_DTYPES:
                raise RuntimeError(f"FusedAdam only supports fp32/fp16/bf16/fp8 {name}.")
        if capturable:
            raise SettingsError(
                "the FusedAdam stand-in does not simulate CUDA graphs", got="capturable=True"
            )
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(cast(Any, params), defaults)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.capturable = capturable
        self.master_weights = master_weights
        self._dummy_overflow_buf = torch.tensor([0], dtype=torch.int, device="cuda")
        self.master_weight_dtype = master_weight_dtype
        self.exp_avg_dtype = exp_avg_dtype
        self.exp_avg_sq_dtype = exp_avg_sq_dtype
        self.name_to_dtype_map = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            "master_param": master_weight_dtype,
        }
        self.dtype_to_range_map = {
            torch.float16: torch.full([1], torch.finfo(torch.float16).max / 2.0),
            torch.uint8: torch.full([1], E4M3_MAX),
        }
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = (
            store_param_remainders and master_weights and master_weight_dtype == torch.float32
        )
        # bf16 moments are widened and narrowed inside the kernel.
        self.fuse_unscale = exp_avg_dtype == exp_avg_sq_dtype == torch.bfloat16
        self.set_grad_none = set_grad_none
        if set_grad_none is not None:
            warnings.warn(
                "set_grad_none of FusedAdam is deprecated, use zero_grad(set_to_none=...)",
                DeprecationWarning,
                stacklevel=2,
            )

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drops (by default) or zeroes the gradients that this optimizer reads."""
        if self.set_grad_none is not None:
            if set_to_none is not None and set_to_none != self.set_grad_none:
                raise ValueError(
                    f"zero_grad(set_to_none={set_to_none}) contradicts "
                    f"set_grad_none={self.set_grad_none}"
                )
            set_to_none = self.set_grad_none
        drop = True if set_to_none is None else set_to_none
        if not self.use_decoupled_grad:
            super().zero_grad(set_to_none=drop)
            return
        for param in self._params():
            if drop:
                param.decoupled_grad = None  # type: ignore[attr-defined]
            else:
                param.decoupled_grad.zero_()  # type: ignore[attr-defined]

    def _params(self) -> Iterable[torch.nn.Parameter]:
        return (param for group in self.param_groups for param in group["params"])

    def _keeps_remainder(self, param: torch.Tensor) -> bool:
        return self.store_param_remainders and param.dtype == torch.bfloat16

    def _apply_scale(
        self,
        state_name: str,
        unscaled_state: torch.Tensor,
        scaled_state: torch.Tensor,
        scale: torch.Tensor,
    ) -> None:
        """Writes an fp32 state into its low-precision tensor, and the scale used into `scale`.

        For fp16, `unscaled_state` is overwritten, as in Transformer Engine.
        """
        assert unscaled_state.dtype == torch.float32
        if scaled_state.dtype == torch.bfloat16:
            scaled_state.copy_(unscaled_state.to(torch.bfloat16))
            return
        dtype = self.name_to_dtype_map[state_name]
        if dtype == torch.uint8:
            assert isinstance(scaled_state, Float8Tensor)
        else:
            assert scaled_state.dtype == dtype
        values = unscaled_state.to(scaled_state.device)
        largest = self.dtype_to_range_map[dtype].to(scaled_state.device)
        low, high = torch.aminmax(values)
        torch.div(torch.maximum(-low, high), largest, out=scale)
        if isinstance(scaled_state, Float8Tensor):
            # An all-zero state has no scale: 0 * inf codes it as NaN. That follows the source of
            # Transformer Engine, whose fp16 branch alone guards against it; not measured on a GPU.
            scaled_state._quantizer.scale.copy_(scale.reciprocal())
            scaled_state.copy_(values)
        else:
            values.mul_(torch.where(scale > 0, scale.reciprocal(), 0.0))
            scaled_state.copy_(values)

    def get_unscaled_state(
        self, param: torch.nn.Parameter, state_name: str, skip_unscale: bool = False
    ) -> torch.Tensor:
        """A state as fp32: itself where it is stored so (or as int16 remainder), else a new tensor.

        Args:
            skip_unscale: leave bf16 states as they are.
        """
        held = cast(torch.Tensor, self.state[param][state_name])
        dtype = self.name_to_dtype_map[state_name]
        if dtype == torch.uint8:
            return cast(Float8Tensor, held).dequantize()
        remainder = state_name == "master_param" and self._keeps_remainder(param)
        assert held.dtype == (torch.int16 if remainder else dtype)
        if dtype == torch.float16:
            return held.float().mul_(self._scales[param][state_name])
        if dtype == torch.bfloat16 and not skip_unscale:
            return held.float()
        return held

    def set_scaled_state(
        self, param: torch.nn.Parameter, state_name: str, unscaled_state: torch.Tensor
    ) -> None:
        """Stores a state given as fp32 (int16 for a remainder) in the dtype it is kept in.

        Raises:
            AssertionError: another dtype; bare, as in Transformer Engine.
            AttributeError: something that is no tensor, likewise.
        """
        remainder = state_name == "master_param" and self._keeps_remainder(param)
        assert unscaled_state.dtype == (torch.int16 if remainder else torch.float32)
        state = self.state[param]
        if state_name not in state:
            self._initialize_state(param, state_name, False, remainder)
        if self.name_to_dtype_map[state_name] != torch.float32:
            scale = self._scales[param][state_name]
            self._apply_scale(state_name, unscaled_state, state[state_name], scale)
        else:
            state[state_name].copy_(unscaled_state)

    def _initialize_state(
        self,
        param: torch.nn.Parameter,
        state_name: str,
        zero_buffer: bool,
        store_param_remainders: bool = False,
    ) -> None:
        """Allocates one state, and its scale where it is not fp32."""
        dtype = self.name_to_dtype_map[state_name]
        if store_param_remainders:
            data = torch.zeros_like(param, dtype=torch.int16)
        else:
            data = torch.empty_like(param, dtype=dtype)
        data = data.detach()
        if zero_buffer:
            data.zero_()
        if dtype == torch.uint8:
            coded = Float8Quantizer(param.device).make_empty(data.shape)
            self.state[param][state_name] = coded.quantize_(data.float())
        else:
            self.state[param][state_name] = data
        if dtype != torch.float32:
            scale = torch.ones([1], dtype=torch.float32, device=param.device)
            self._scales.setdefault(param, {})[state_name] = scale

    def initialize_state(self, param: torch.nn.Parameter, store_param_remainders: bool) -> None:
        """Zero moments, and a master that equals the param."""
        self._initialize_state(param, "exp_avg", zero_buffer=True)
        self._initialize_state(param, "exp_avg_sq", zero_buffer=True)
        if not self.master_weights:
            return
        self._initialize_state(param, "master_param", False, store_param_remainders)
        if not store_param_remainders:
            self.set_scaled_state(param, "master_param", param.detach().clone().float())

    def state_dict(self) -> dict[str, Any]:
        """torch's state dict with every state as fp32 (remainders as int16)."""
        result = super().state_dict()
        for key, param in zip(_keys(result), self._params(), strict=True):
            held = result["state"].get(key)
            if held is not None:
                result["state"][key] = {k: self.get_unscaled_state(param, k) for k in held}
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes fp32 states (int16 remainders) and stores them in their own dtypes."""
        super().load_state_dict(state_dict)
        for key, param in zip(_keys(state_dict), self._params(), strict=True):
            given = state_dict["state"].get(key)
            if given is None:
                continue
            self.state[param] = {}
            for name, value in given.items():
                if value is None:
                    continue
                if name == "master_param" and self._keeps_remainder(param):
                    self.set_scaled_state(param, name, value)
                else:
                    self.set_scaled_state(param, name, value.float())

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, grad_scaler: Any = None
    ) -> float | None:
        """One step. Every group's int `step` advances, that of an empty group too."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            self._check_group(group)
            for param in group["params"]:
                self._step_param(group, param)
        return loss

    def _check_group(self, group: dict[str, Any]) -> None:
        dtypes = {param.dtype for param in group["params"] if self._grad(param) is not None}
        if not dtypes <= {torch.float32, torch.float16, torch.bfloat16}:
            raise RuntimeError("FusedAdam only support model weights in fp32, fp16, bf16 and fp8")
        if {torch.float16, torch.bfloat16} <= dtypes:
            raise RuntimeError(
                "FusedAdam does not support a mix of float16 and bfloat16 model weights."
            )

    def _grad(self, param: torch.Tensor) -> torch.Tensor | None:
        name = "decoupled_grad" if self.use_decoupled_grad else "grad"
        return cast("torch.Tensor | None", getattr(param, name, None))

    def _step_param(self, group: dict[str, Any], param: torch.nn.Parameter) -> None:
        state = self.state[param]
        if len(state) == 0:
            self.initialize_state(param, self._keeps_remainder(param))
        grad = self._grad(param)
        if grad is None:
            return
        if grad.is_sparse:
            raise RuntimeError("FusedAdam does not support sparse gradients.")
        working = {
            name: self.get_unscaled_state(param, name, skip_unscale=self.fuse_unscale)
            for name in STATE_NAMES
            if name in state
        }
        self._update(group, param, grad, working)
        for name, values in working.items():
            fused = self.fuse_unscale and name != "master_param"
            if self.name_to_dtype_map[name] != torch.float32 and not fused:
                self._apply_scale(name, values, state[name], self._scales[param][name])

    def _update(
        self,
        group: dict[str, Any],
        param: torch.nn.Parameter,
        grad: torch.Tensor,
        working: dict[str, torch.Tensor],
    ) -> None:
        """The kernels: fp32 arithmetic on one param, results written into param and `working`."""
        remainder = self._keeps_remainder(param)
        half = param.dtype != torch.float32
        stored = working.get("master_param") if half and self.master_weights else None
        if remainder:
            master = master_from_remainder(param, working["master_param"])
        else:
            master = param.detach().float() if stored is None else stored
        moments = (working["exp_avg"].float(), working["exp_avg_sq"].float())
        updated = adam(
            master, grad.detach().float(), moments, group, decoupled=bool(self.adam_w_mode)
        )
        working["exp_avg"].copy_(moments[0])
        working["exp_avg_sq"].copy_(moments[1])
        if remainder:
            high, low = split_master(updated)
            param.data.copy_(high)
            working["master_param"].copy_(low)
            return
        if stored is not None:
            stored.copy_(updated)
        param.data.copy_(updated)


def adam(
    master: torch.Tensor,
    grad: torch.Tensor,
    moments: tuple[torch.Tensor, torch.Tensor],
    group: dict[str, Any],
    *,
    decoupled: bool,
) -> torch.Tensor:
    """One Adam update in fp32. Moments are updated in place; returns the new master."""
    beta1, beta2 = group["betas"]
    step, decay = group["step"], group["weight_decay"]
    correction1 = correction2 = 1.0
    if group["bias_correction"]:
        correction1, correction2 = 1 - math.pow(beta1, step), 1 - math.pow(beta2, step)
    if not decoupled:
        grad = grad + decay * master
    exp_avg, exp_avg_sq = moments
    exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
    exp_avg_sq.mul_(beta2).add_(grad * grad, alpha=1 - beta2)
    denominator = (exp_avg_sq / correction2).sqrt_().add_(group["eps"])
    update = (exp_avg / correction1).div_(denominator)
    if decoupled:
        update = update + decay * master
    updated: torch.Tensor = master - group["lr"] * update
    return updated


def _keys(state_dict: dict[str, Any]) -> list[int]:
    return [key for group in state_dict["param_groups"] for key in group["params"]]

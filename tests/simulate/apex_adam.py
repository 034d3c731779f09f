"""A stand-in for the FusedAdam of NVIDIA Apex, in plain torch.

The same arguments, defaults, states, errors, and a step counter for each param group that is made
by the first step of a group with parameters. It passes for a class of Apex's own module, since code
that has to tell Apex from others looks there. The arithmetic is that of its multi-tensor kernels,
in fp32; bitwise equality with the GPU is not claimed, since the GPU fuses multiplications and
additions. Not simulated: master_weights=True, and what capturable=True does with a grad scaler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch

from vime_optim.errors import SettingsError
from vime_optim.simulate.fused_adam import adam

MODULE = "apex.optimizers.fused_adam"
_PARAM_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class FusedAdam(torch.optim.Optimizer):
    """Adam with float32 moments. See the module's docstring.

    Args:
        params: parameters (float32, float16 or bfloat16) or groups.
        adam_w_mode: decoupled weight decay.
        set_grad_none: zero_grad() drops gradients instead of zeroing them.
        capturable: learning rates and step counters are tensors on the parameters' device.
        master_weights: refused without capturable, as in Apex; with it, not simulated.

    Raises:
        RuntimeError: a combination that Apex refuses.
        SettingsError: master_weights=True.
    """

    __module__ = MODULE

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter | dict[str, Any]],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant.")
        if master_weights and not capturable:
            raise RuntimeError("Master weights is currently only supported with capturable.")
        if master_weights:
            raise SettingsError(
                "the stand-in for Apex's FusedAdam keeps no master weights",
                got="master_weights=True",
            )
        defaults = {
            "lr": torch.tensor(lr, dtype=torch.float32) if capturable else lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(cast(Any, params), defaults)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.set_grad_none = set_grad_none
        self.capturable = capturable
        self.master_weights = master_weights
        self._dummy_overflow_buf = torch.tensor([0], dtype=torch.int, device="cuda")
        if capturable:
            for group in self.param_groups:
                if group["params"]:
                    # A copy for each, as on a GPU; groups without parameters share the default.
                    device = group["params"][0].device
                    group["lr"] = torch.tensor(float(group["lr"]), device=device)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drops the gradients, or zeroes them with set_grad_none=False."""
        drop = self.set_grad_none if set_to_none is None else set_to_none
        super().zero_grad(set_to_none=drop)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: Any = None,
        grad_norms: Any = None,
        grad_scaler: Any = None,
    ) -> float | None:
        """One step. A group without parameters is passed over, and counts nothing.

        Raises:
            RuntimeError: one of the four arguments of Apex's older FusedAdam, a sparse gradient, or
                parameters of another dtype.
        """
        if any(p is not None for p in (grads, output_params, scale, grad_norms)):
            raise RuntimeError(
                "FusedAdam has been updated: step() takes neither grads, output_params, scale nor"
                " grad_norms."
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["params"]:
                self._count(group)
                for param in group["params"]:
                    self._step_param(group, param)
        return loss

    def _count(self, group: dict[str, Any]) -> None:
        if "step" in group:
            # A tensor is advanced in place: two groups must never share one.
            group["step"] += 1
        elif self.capturable:
            device = group["params"][0].device
            group["step"] = torch.tensor([1], dtype=torch.int, device=device)
        else:
            group["step"] = 1

    def _step_param(self, group: dict[str, Any], param: torch.nn.Parameter) -> None:
        if param.grad is None:
            return
        if param.grad.is_sparse:
            raise RuntimeError("FusedAdam does not support sparse gradients.")
        if param.dtype not in _PARAM_DTYPES:
            raise RuntimeError("FusedAdam only support fp16, bf16 and fp32.")
        state = self.state[param]
        if len(state) == 0:
            state["exp_avg"] = torch.zeros_like(param.data).float()
            state["exp_avg_sq"] = torch.zeros_like(param.data).float()
        self._check_tensors(group, state)
        values = {
            **group,
            "lr": float(group["lr"]),
            "step": int(group["step"]),
        }
        updated = adam(
            param.detach().float(),
            param.grad.detach().float(),
            (state["exp_avg"], state["exp_avg_sq"]),
            values,
            decoupled=bool(self.adam_w_mode),
        )
        param.data.copy_(updated)
        if self.capturable:
            # Its kernel stores the moments by way of the parameter's type, after it has used them.
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].copy_(state[name].to(param.dtype))

    def _check_tensors(self, group: dict[str, Any], state: dict[str, Any]) -> None:
        """The kernels take raw pointers: what they would read wrongly is an error here."""
        if any(state[name].dtype != torch.float32 for name in ("exp_avg", "exp_avg_sq")):
            raise RuntimeError("expected scalar type Float")
        kinds = (("lr", torch.float32), ("step", torch.int32)) if self.capturable else ()
        for key, dtype in kinds:
            value = group[key]
            if not isinstance(value, torch.Tensor) or value.dtype != dtype:
                raise TypeError(f"multi_tensor_adam_capturable takes {key} as a {dtype} tensor")

"""Gradients that HybridDeviceOptimizer hands to the part that stays on the device.

Symptom: with PAO, native float32 parameters on the device (a norm, a router's bias) are never
trained, and nothing is said; with 16-bit gradients the device's step may read a gradient before it
is there.
Cause: under PAO the gradient is in `decoupled_grad`. It is looked up for host copies and for
float32 masters, but a float32 parameter on the device has neither, and its optimizer reads `grad`.
Gradients are cast on the copy stream, which the device's step does not wait for.
Changes: such a parameter gets its `grad`; the device's step waits for casts, where there are any.
Leaves alone: host parameters, masters, and float32 gradients, which are not cast.
Remove when: `_set_sub_optimizer_grads` looks at every parameter of the device's optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from vime_optim.probe import missing_parameters
from vime_optim.registry import NEEDED, Diagnosis, Fix, Hit, Target, not_understood

MODULE = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer"


def _wrap_set_grads(original: Any, hit: Hit) -> Any:
    def set_sub_optimizer_grads(self: Any) -> None:
        hit()
        original(self)
        if self.gpu_optimizer is None:
            return
        for param in _native_device_params(self):
            if hasattr(param, "decoupled_grad"):
                grad = param.decoupled_grad
                param.grad = None if grad is None else grad.to(param.dtype)
        if _casts_gradients(self):
            _step_after(self.gpu_optimizer, torch.cuda.current_stream().record_event())

    return set_sub_optimizer_grads


def _step_after(device_optimizer: Any, copied: Any) -> None:
    """Make the stream of the device's next step wait for an event of the copy stream."""

    def wait(*_: Any) -> None:
        copied.wait(torch.cuda.current_stream())
        handle.remove()

    # A hook, since torch replaces `step` on the class whenever it is not its own wrapper.
    handle = device_optimizer.register_step_pre_hook(wait)


def _native_device_params(hybrid: Any) -> Iterator[torch.Tensor]:
    """Parameters that the device's optimizer updates itself, without a float32 master."""
    for group in hybrid.gpu_optimizer.param_groups:
        for param in group["params"]:
            if hybrid.inner_param_to_orig_param.get(param, param) is param:
                yield param


def _casts_gradients(hybrid: Any) -> bool:
    """Whether any parameter on the device gets its gradient by a cast."""
    for group in hybrid.gpu_optimizer.param_groups:
        for param in group["params"]:
            source = hybrid.inner_param_to_orig_param.get(param, param)
            grad = getattr(source, "decoupled_grad", source.grad)
            if grad is not None and grad.dtype != param.dtype:
                return True
    return False


def _diagnose(module: ModuleType, original: Any) -> Diagnosis:
    reason = missing_parameters(original, "self")
    return not_understood(reason) if reason else NEEDED


FIXES = (
    Fix(
        id="device-gradients",
        faults=("F28",),
        summary="float32 parameters on the device are trained under CPU offload with PAO",
        targets=(
            Target(
                MODULE,
                "HybridDeviceOptimizer._set_sub_optimizer_grads",
                _wrap_set_grads,
                _diagnose,
            ),
        ),
    ),
)

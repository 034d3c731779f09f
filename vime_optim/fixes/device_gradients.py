"""Gradients that HybridDeviceOptimizer hands to the part that stays on the device.

Symptom: float32 parameters on the device are never trained under PAO (F28); with 16-bit gradients
the device's step may read a gradient before it is there.
Cause: under PAO the gradient is in `decoupled_grad`, looked up for host copies and masters alone,
and such a parameter has neither. The device's step does not wait for casts on the copy stream.
Changes: such a parameter gets its `grad`; the device's step waits for casts, where there are any.
Leaves alone: host parameters, masters, and float32 gradients, which are not cast.
Remove when: `_set_sub_optimizer_grads` looks at every parameter of the device's optimizer.
"""

from __future__ import annotations

from typing import Any

import torch

from vime_optim.fixes.places import HYBRID_OPTIMIZER
from vime_optim.registry import Fix, Hit, takes

FIX = Fix(
    id="device-gradients",
    faults=("F28",),
    summary="float32 parameters on the device are trained under CPU offload with PAO",
    after=("pageable",),
)


@FIX.wraps(HYBRID_OPTIMIZER, "_set_sub_optimizer_grads", takes("self"))
def _set_grads(original: Any, hit: Hit, self: Any) -> None:
    hit()
    original(self)
    if self.gpu_optimizer is not None and _hand_over_gradients(self):
        _step_after(self.gpu_optimizer, torch.cuda.current_stream().record_event())


def _hand_over_gradients(hybrid: Any) -> bool:
    """Give native parameters on the device their gradients; whether any there is made by a cast."""
    casts = False
    for group in hybrid.gpu_optimizer.param_groups:
        for param in group["params"]:
            source = hybrid.inner_param_to_orig_param.get(param, param)
            grad = getattr(source, "decoupled_grad", source.grad)
            casts = casts or (grad is not None and grad.dtype != param.dtype)
            if source is param and hasattr(param, "decoupled_grad"):
                # Updated in place, without a float32 master, which Megatron would have served.
                param.grad = None if grad is None else grad.to(param.dtype)
    return casts


def _step_after(device_optimizer: Any, copied: Any) -> None:
    """Make the stream of the device's next step wait for an event of the copy stream."""

    def wait(*_: Any) -> None:
        copied.wait(torch.cuda.current_stream())
        handle.remove()

    # A hook, since torch replaces `step` on the class whenever it is not its own wrapper.
    handle = device_optimizer.register_step_pre_hook(wait)

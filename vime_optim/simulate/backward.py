"""The simulation inside Python code that autograd calls.

torch's engine carries dispatch modes into backward, but not torch function modes: without this, a
hook or the backward of an autograd.Function would see plain CPU tensors, and could not create
tensors on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from vime_optim.simulate.attributes import Patches
from vime_optim.simulate.modes import DeviceArguments


def simulated(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with the simulation on, wherever it is called from."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch._C._len_torch_function_stack() > 0:
            return function(*args, **kwargs)
        with DeviceArguments():
            return function(*args, **kwargs)

    return call


def _registering(register: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(register)
    def registering(self: torch.Tensor, hook: Callable[..., Any], *args: Any) -> Any:
        return register(self, simulated(hook), *args)

    return registering


def apply(patches: Patches) -> None:
    patches.set(BackwardCFunction, "apply", simulated(BackwardCFunction.apply))
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        patches.set(torch.Tensor, name, _registering(getattr(torch.Tensor, name)))


def wrap_megatron_hooks(ddp_class: Any) -> None:
    """Megatron's DDP hangs its hooks on C++ nodes, whose register_hook cannot be replaced."""
    make = ddp_class._make_backward_post_hook
    if hasattr(make, "__wrapped__"):
        return

    @functools.wraps(make)
    def make_simulated(self: Any, param: torch.nn.Parameter) -> Callable[..., Any]:
        return simulated(make(self, param))

    ddp_class._make_backward_post_hook = make_simulated

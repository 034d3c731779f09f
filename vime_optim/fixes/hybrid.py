"""HybridDeviceOptimizer (CPU offload): lookups, groups, masters, inert state, copy order, pinning.

Symptom: load dies with KeyError in _update_fp32_params_by_new_state (F5); FusedAdam's counter
freezes (F4); resume is not bitwise, as state is made by a step on random gradients (F15); a model
loaded without its optimizer loses its weights on the first step (F12); rare wrong weights with
--overlap-cpu-optimizer-d2h-h2d (F17); no run at all where memory cannot be pinned.
Cause: each method serves one configuration (bf16 parameters, all of them offloaded) and is
called under others.
Changes: see each wrapper.
Leaves alone: step(), how parameters are split between host and device.
Remove when: each target is diagnosed as fixed upstream.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from vime_optim.optimizer.fresh_state import ensure_hybrid_state
from vime_optim.optimizer.kinds import MASTER, STATE_MASTER, sub_optimizers
from vime_optim.optimizer.refresh import is_trained, stays
from vime_optim.optimizer.slots import Slot
from vime_optim.probe import has_patch, source_of
from vime_optim.registry import (
    NEEDED,
    Diagnosis,
    Fix,
    Hit,
    Target,
    Wrap,
    fixed_upstream,
    not_understood,
    takes,
)

MODULE = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer"


def _wrap_dummy_step(original: Any, hit: Hit) -> Any:
    """Replaced: stepping with random gradients is the fault itself."""

    def dummy_step(self: Any) -> None:
        hit()
        ensure_hybrid_state(self)

    return dummy_step


def _wrap_sync_groups(original: Any, hit: Hit) -> Any:
    def sync_hdo_param_groups_to_sub_optimizers(self: Any) -> None:
        # The parts count by themselves. A counter that a checkpoint put into the hybrid's own
        # groups would be copied over theirs before every step.
        hit()
        for group in self.param_groups:
            group.pop("step", None)
        original(self)

    return sync_hdo_param_groups_to_sub_optimizers


def _wrap_update_masters(original: Any, hit: Hit) -> Any:
    """Replaced: Megatron looks up every parameter among those that have a float32 copy."""

    @torch.no_grad()
    def update_fp32_params_by_new_state(self: Any) -> None:
        hit()
        if not self.param_update_in_fp32:
            return
        for param, state in self.state.items():
            loaded = state.get(STATE_MASTER)
            held = self.param_to_inner_param[param]
            if loaded is not None and loaded is not held:
                held.detach().copy_(loaded.detach())

    return update_fp32_params_by_new_state


def _wrap_sync_state(original: Any, hit: Hit) -> Any:
    def sync_hdo_state_to_sub_optimizers(self: Any) -> None:
        hit()
        original(self)
        # A master has one storage: the one that the part updates. Another copy kept in `state`
        # would hold its bytes twice and go stale.
        if self.param_update_in_fp32:
            for param, state in self.state.items():
                if STATE_MASTER in state:
                    state[STATE_MASTER] = self.param_to_inner_param[param]

    return sync_hdo_state_to_sub_optimizers


def _wrap_move_state(original: Any, hit: Hit) -> Any:
    """Replaced: Megatron tells the parts apart by class, and both may be torch's AdamW."""

    def move_new_state_to_right_device(self: Any) -> None:
        hit()
        for optimizer in self.sub_optimizers:
            for param, state in optimizer.state.items():
                shared = self.state[self.inner_param_to_orig_param.get(param, param)]
                for name, value in state.items():
                    if not isinstance(value, torch.Tensor) or name in ("step", STATE_MASTER):
                        continue
                    if value.is_cuda != param.is_cuda:
                        shared[name] = state[name] = value.to("cuda" if param.is_cuda else "cpu")

    return move_new_state_to_right_device


def _wrap_refresh_masters(original: Any, hit: Hit) -> Any:
    """Replaced: Megatron's own would round masters that belong to their parameters."""

    @torch.no_grad()
    def update_fp32_param_by_new_param(self: Any) -> None:
        hit()
        trained = is_trained(self)
        # Megatron refreshes the float32 copies of 16-bit parameters alone; the host copies of
        # float32 ones (every parameter without PAO) would be stepped from where they were.
        for param, held in self.param_to_inner_param.items():
            if held is not param and not stays(self, Slot(MASTER, held), param, trained):
                held.detach().copy_(param.detach())

    return update_fp32_param_by_new_param


def _wrap_copy_back(original: Any, hit: Hit) -> Any:
    def register_param_copy_back_gpu_hook(self: Any) -> None:
        hit()
        original(self)

        def wait_for_copies(optimizer: Any, args: Any, kwargs: Any) -> None:
            # Megatron makes the main stream wait for the gradients' stream; the parameters are
            # copied on another one.
            self._h2d_stream.record_event().wait(torch.cuda.current_stream())

        for optimizer in sub_optimizers(self):
            if optimizer is not self.gpu_optimizer:
                optimizer.register_step_post_hook(wait_for_copies)

    return register_param_copy_back_gpu_hook


def _diagnose_copy_back(module: ModuleType, original: Any) -> Diagnosis:
    source = source_of(original)
    if "_h2d_stream.record_event().wait(" in source:
        return fixed_upstream("the main stream waits for the host-to-device stream")
    if "_d2h_stream.record_event().wait(" in source:
        return NEEDED
    return not_understood("no wait on a recorded event in its source")


def _wrap_split_groups(original: Any, hit: Hit) -> Any:
    def get_sub_optimizer_param_groups(self: Any, *args: Any, **kwargs: Any) -> Any:
        hit()
        with _pinning_or_pageable():
            return original(self, *args, **kwargs)

    return get_sub_optimizer_param_groups


@contextmanager
def _pinning_or_pageable() -> Iterator[None]:
    """Tensor.pin_memory gives back the pageable tensor where memory cannot be pinned.

    The method is replaced for the time of one optimizer's construction, since Megatron calls it
    without a way to decline.
    """
    pin_memory = torch.Tensor.pin_memory

    def tolerant(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        try:
            return pin_memory(tensor, *args, **kwargs)
        except RuntimeError as error:
            _warn_pageable(error)
            return tensor

    torch.Tensor.pin_memory = tolerant  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign]


def _wrap_build_shards(original: Any, hit: Hit) -> Any:
    def build_model_and_main_param_groups(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # A shard of a float32 parameter is a view of it, which autograd follows; torch then takes
        # no such tensor into a new optimizer, and CPU offload builds one. A shard only holds data.
        hit()
        with torch.no_grad():
            return original(cls, *args, **kwargs)

    return build_model_and_main_param_groups


def _wrap_set_grads(original: Any, hit: Hit) -> Any:
    def set_sub_optimizer_grads(self: Any) -> None:
        hit()
        try:
            original(self)
        except RuntimeError as error:
            if not self.pin_cpu_grads:
                raise
            # Once more without pinning: every copy that was made is simply made again. An error
            # of another cause comes back the same.
            self.pin_cpu_grads = False
            try:
                original(self)
            except RuntimeError:
                self.pin_cpu_grads = True
                raise
            _warn_pageable(error)

    return set_sub_optimizer_grads


_warned_pageable = False


def _warn_pageable(error: RuntimeError) -> None:
    global _warned_pageable
    if not _warned_pageable:
        _warned_pageable = True
        warnings.warn(
            "vime_optim: host memory cannot be pinned here; optimizer state stays pageable and"
            f" copies to the device are slower ({str(error).splitlines()[0]})",
            stacklevel=3,
        )


_diagnose = takes("self")


def _unless(patch: str) -> Any:
    """Needed unless the method carries this patch of ours."""

    def diagnose(module: ModuleType, original: Any) -> Diagnosis:
        if has_patch(original, patch):
            return fixed_upstream(f"patch {patch} is there")
        return _diagnose(module, original)

    return diagnose


def _diagnose_sync_state(module: ModuleType, original: Any) -> Diagnosis:
    if has_patch(module, "lookups"):
        return fixed_upstream("patch lookups is there")  # it keeps one storage a master
    return _diagnose(module, original)


def _target(name: str, wrap: Wrap, diagnose: Any = _diagnose, *, optional: bool = False) -> Target:
    return Target(MODULE, f"HybridDeviceOptimizer.{name}", wrap, diagnose, optional)


FIXES = (
    Fix(
        id="hybrid-restore",
        faults=("F4", "F5"),
        summary="HybridDeviceOptimizer restores every parameter, on its own device and storage",
        targets=(
            Target(
                "megatron.core.optimizer.distrib_optimizer",
                "DistributedOptimizer._build_model_and_main_param_groups",
                _wrap_build_shards,
                lambda module, original: NEEDED,
            ),
            _target(
                "_sync_hdo_param_groups_to_sub_optimizers", _wrap_sync_groups, _unless("counter")
            ),
            _target("_update_fp32_params_by_new_state", _wrap_update_masters, _unless("lookups")),
            _target("_sync_hdo_state_to_sub_optimizers", _wrap_sync_state, _diagnose_sync_state),
            _target("_move_new_state_to_right_device", _wrap_move_state, _unless("native")),
        ),
    ),
    Fix(
        id="inert-state",
        faults=("F15",),
        summary="state is made without random numbers and without moving a parameter",
        targets=(_target("dummy_step", _wrap_dummy_step, _unless("inert-state")),),
    ),
    Fix(
        id="hybrid-refresh",
        faults=("F12",),
        summary="host and float32 copies follow when a model is loaded without its optimizer",
        targets=(
            _target("update_fp32_param_by_new_param", _wrap_refresh_masters, _unless("fine-tune")),
        ),
    ),
    Fix(
        id="copy-back-order",
        faults=("F17",),
        summary="the main stream waits for the copies of updated parameters",
        targets=(
            _target("_register_param_copy_back_gpu_hook", _wrap_copy_back, _diagnose_copy_back),
        ),
    ),
    Fix(
        id="pageable",
        faults=(),
        summary="host memory that cannot be pinned stays pageable, with one warning",
        targets=(
            _target("_get_sub_optimizer_param_groups", _wrap_split_groups),
            _target("_set_sub_optimizer_grads", _wrap_set_grads),
        ),
    ),
)

"""A model loaded without its optimizer (fine-tuning) refreshes every master parameter.

Symptom: the first step after loading a model throws the loaded weights away (F12).
Cause: `_copy_model_params_to_main_params` returns early under PAO and under CPU offload.
Changes: the masters that it left out are set from the model's parameters, or from the state dict
that was given. In an optimizer that was trained or restored, masters that round to their
parameters stay as they are.
Leaves alone: Megatron-FSDP, stubs, float8 parameters under delayed scaling with PAO.
Remove when: the method has no early return.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch
import wrapt

from vime_optim.fixes.places import DISTRIBUTED_OPTIMIZER
from vime_optim.optimizer.fresh_state import ensure_state
from vime_optim.optimizer.kinds import (
    has_buffers,
    is_hybrid,
    is_precision_aware,
    owned_params,
)
from vime_optim.optimizer.refresh import is_trained, stays
from vime_optim.optimizer.restoring import sync_moved_params, write_slot
from vime_optim.optimizer.slots import master_slot
from vime_optim.probe import source_of
from vime_optim.registry import NEEDED, Diagnosis, Fix, Hit, fixed_upstream, unless_patched

_PLAIN = (torch.Tensor, torch.nn.Parameter)


FIX = Fix(
    id="fine-tune",
    faults=("F12",),
    summary="loading a model without its optimizer refreshes every master parameter",
)


class _Unmarked(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """An optimizer that isinstance() does not take for a HybridDeviceOptimizer."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return torch.optim.Optimizer


def _diagnose(module: ModuleType, original: Any) -> Diagnosis:
    found = unless_patched("fine-tune", "state_dict")(module, original)
    returns_early = ("update_fp32_param_by_new_param", "use_precision_aware_optimizer")
    if found is NEEDED and not any(word in source_of(original) for word in returns_early):
        return fixed_upstream("no early return under PAO or CPU offload")
    return found


@FIX.wraps(DISTRIBUTED_OPTIMIZER, "_copy_model_params_to_main_params", _diagnose)
def _copy_params(original: Any, hit: Hit, self: Any, state_dict: Any = None) -> None:
    if not has_buffers(self):
        original(self, *(() if state_dict is None else (state_dict,)))
        return
    hit()
    inner = self.optimizer
    if is_precision_aware(self):
        _refresh_inner_masters(self, state_dict)
        return
    # Megatron's own masters first; it would skip them for a HybridDeviceOptimizer.
    with _without_kept(self) if state_dict is None else nullcontext():
        self.optimizer = _Unmarked(inner) if is_hybrid(inner) else inner
        try:
            original(self, *(() if state_dict is None else (state_dict,)))
        finally:
            self.optimizer = inner
    if is_hybrid(inner):
        inner.update_fp32_param_by_new_param()


@contextmanager
def _without_kept(dist_opt: Any) -> Iterator[None]:
    """Megatron's method sees no master that is to stay as it is."""
    whole = dist_opt.model_float16_groups, dist_opt.shard_fp32_from_float16_groups
    kept = _kept(dist_opt)
    pairs = [
        [(param, main) for param, main in zip(*groups, strict=True) if param not in kept]
        for groups in zip(*whole, strict=True)
    ]
    dist_opt.model_float16_groups = [[param for param, _ in group] for group in pairs]
    dist_opt.shard_fp32_from_float16_groups = [[main for _, main in group] for group in pairs]
    try:
        yield
    finally:
        dist_opt.model_float16_groups, dist_opt.shard_fp32_from_float16_groups = whole


@torch.no_grad()
def _kept(dist_opt: Any) -> set[torch.Tensor]:
    """Model parameters whose masters stay."""
    if not is_trained(dist_opt.optimizer):
        return set()
    return {
        model_param
        for model_param, ranges in owned_params(dist_opt)
        if type(model_param) in _PLAIN
        and stays(
            dist_opt, master_slot(dist_opt, model_param), _shard(model_param, ranges), trained=True
        )
    }


def _shard(param: torch.Tensor, ranges: dict[str, Any]) -> torch.Tensor:
    return param.detach().reshape(-1)[ranges["param"].start : ranges["param"].end]


@torch.no_grad()
def _refresh_inner_masters(dist_opt: Any, state_dict: Any) -> None:
    if not is_hybrid(dist_opt.optimizer):
        if not dist_opt.optimizer.state and state_dict is None:
            return  # FusedAdam makes its masters from the parameters, on the first step
        ensure_state(dist_opt)
    sources = {}
    kept = _kept(dist_opt) if state_dict is None else set()
    if state_dict is not None:
        sources = dist_opt._build_model_param_to_state_dict_param_map(state_dict)
    for model_param, ranges in owned_params(dist_opt):
        if model_param in kept:
            continue
        source = sources.get(model_param, model_param).detach()
        if type(source) not in _PLAIN:
            source = source.float()  # a quantized tensor cannot be sliced by elements
        flat = _shard(source, ranges).float()
        write_slot(dist_opt, master_slot(dist_opt, model_param), flat)
    sync_moved_params(dist_opt)

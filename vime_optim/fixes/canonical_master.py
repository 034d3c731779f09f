"""The float32 master parameter is the canonical value of fully_reshardable.

Symptom: load asserts in set_scaled_state under PAO with remainders (F7).
Cause: Megatron gathers whatever FusedAdam keeps, which may be the 16 low bits of the master, as if
it were the master itself.
Changes: while a fully reshardable (or dp_zero) state is gathered, states are read as float32
values; RemainderSlot puts a master back as parameter bits and remainder.
Leaves alone: dp_reshardable, which keeps FusedAdam's own codes, as Megatron writes them.
Remove when: Megatron decodes remainders in get_parameter_state_dp_zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from vime_optim.fixes.places import DISTRIBUTED
from vime_optim.optimizer.kinds import is_hybrid, is_precision_aware
from vime_optim.probe import has_patch, missing_parameters
from vime_optim.registry import NEEDED, Diagnosis, Fix, Hit, Target, fixed_upstream, not_understood

_CANONICAL = "_vime_optim_canonical"
_MOVED = "_vime_optim_params_moved"


def is_canonical(dist_opt: Any) -> bool:
    """True while this optimizer's states are to be read as float32 values."""
    return bool(dist_opt.__dict__.get(_CANONICAL))


@contextmanager
def canonical(dist_opt: Any) -> Iterator[None]:
    """States of this optimizer are read as float32 values in this block."""
    setattr(dist_opt, _CANONICAL, True)
    try:
        yield
    finally:
        delattr(dist_opt, _CANONICAL)


def note_moved(dist_opt: Any) -> None:
    """Remember that restoring a master changed bits of its model parameter on this rank."""
    setattr(dist_opt, _MOVED, True)


def sync_moved_params(dist_opt: Any) -> None:
    """Gather model parameters anew if restoring masters changed any bit of them on any rank.

    With remainders a parameter's bits are half of its master. Loading a master that another backend
    wrote may round a tie the other way; the other data-parallel ranks must see that too.
    """
    inner = dist_opt.optimizer
    coded = getattr(inner, "store_param_remainders", False)
    if is_hybrid(inner) or not coded or not is_precision_aware(dist_opt):
        return
    moved = bool(dist_opt.__dict__.pop(_MOVED, False))
    flag = torch.tensor([moved], dtype=torch.int32, device=torch.cuda.current_device())
    torch.distributed.all_reduce(
        flag, op=torch.distributed.ReduceOp.MAX, group=dist_opt.data_parallel_group
    )
    if bool(flag.item()):
        for chunk in dist_opt.model_chunks:
            chunk.start_param_sync(force_sync=True)


def _wrap_gather(original: Any, hit: Hit) -> Any:
    def get_parameter_state_dp_zero(self: Any, *args: Any, **kwargs: Any) -> Any:
        hit()
        with canonical(self):
            return original(self, *args, **kwargs)

    return get_parameter_state_dp_zero


def _diagnose(module: ModuleType, original: Any) -> Diagnosis:
    reason = missing_parameters(original, "self")
    if reason:
        return not_understood(reason)
    if has_patch(original, "canonical-master"):
        return fixed_upstream("patch 0005-canonical-master is there")
    return NEEDED


FIX = Fix(
    id="canonical-master",
    faults=("F7",),
    summary="fully_reshardable holds float32 masters and moments, whatever the backend stores",
    targets=(
        Target(
            DISTRIBUTED,
            "DistributedOptimizer.get_parameter_state_dp_zero",
            _wrap_gather,
            _diagnose,
        ),
    ),
)

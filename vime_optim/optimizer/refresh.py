"""Which masters stay when masters are set from the model's parameters.

A model that was loaded without its optimizer must become the masters. After a load of both, and in
a run that goes on, a master is more than its parameter, and the same refresh would round it.
"""

from __future__ import annotations

from typing import Any

import torch

from vime_optim.optimizer.kinds import counts_steps, owned_params, sub_optimizers
from vime_optim.optimizer.record import record_of
from vime_optim.optimizer.slots import RemainderSlot, Slot, blocks, master_slot
from vime_optim.optimizer.steps import has_stepped
from vime_optim.optimizer.stock_state import gaps


def is_trained(inner: Any) -> bool:
    """False for masters that are nothing but what a new model was initialised with."""
    if counts_steps(inner):
        return has_stepped(inner)
    return any(any(part.state.values()) for part in sub_optimizers(inner))


def is_rounded_to(master: torch.Tensor, param: torch.Tensor) -> bool:
    """Whether a 16-bit parameter is this float32 master, rounded; ties may have gone either way.

    Both 1-D, of one size, on any device. A single element that is not makes it False.
    """
    return all(_are_roundings(gap, block, param.dtype) for block, gap in gaps(master, param))


def _are_roundings(gap: torch.Tensor, master: torch.Tensor, dtype: torch.dtype) -> bool:
    if dtype != torch.bfloat16:
        return not bool(gap.any())
    tie = (master.contiguous().view(torch.int32) & 0xFFFF) == 0x8000
    return bool(((gap == 0) | ((gap == 1) & tie)).all())


def stays(dist_opt: Any, slot: Slot, param: torch.Tensor, trained: bool) -> bool:
    """Whether the master in `slot` is to be kept; `param` is the same shard of the model's."""
    if not trained or param.dtype not in (torch.bfloat16, torch.float16):
        return False
    if isinstance(slot, RemainderSlot):
        # Half of this master is the parameter itself, so it always rounds to it.
        noted = record_of(dist_opt).restored.get(id(slot.param))
        return noted is not None and noted == _fingerprint(slot.param)
    return is_rounded_to(slot.read(), param)


@torch.no_grad()
def note_restored(dist_opt: Any) -> None:
    """Remember the parameters that restored remainders belong to."""
    noted = {}
    for model_param, _ in owned_params(dist_opt):
        slot = master_slot(dist_opt, model_param)
        if isinstance(slot, RemainderSlot):
            noted[id(slot.param)] = _fingerprint(slot.param)
    record_of(dist_opt).restored = noted


def _fingerprint(param: torch.Tensor) -> tuple[int, int]:
    """Two sums over the bits of a 16-bit parameter, 1-D; the second one knows their order."""
    plain = weighted = 0
    for block in blocks(param.detach().contiguous().view(torch.int16)):
        bits = block.to(torch.int64)
        plain += int(bits.sum())
        weights = torch.arange(bits.numel(), device=bits.device).remainder_(8191).add_(1)
        weighted += int(bits.mul_(weights).sum())
    return plain, weighted

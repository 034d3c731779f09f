"""A restored value goes into the optimizer's own storage; parameters that it moves are gathered."""

from __future__ import annotations

from typing import Any

import torch

from vime_optim import collectives
from vime_optim.optimizer.kinds import is_hybrid, is_precision_aware
from vime_optim.optimizer.record import record_of
from vime_optim.optimizer.slots import RemainderSlot, Slot
from vime_optim.optimizer.stock_state import examine


def write_slot(dist_opt: Any, slot: Slot, value: torch.Tensor) -> None:
    """Store one value, and remember when that changed a bit of the model parameter."""
    if isinstance(slot, RemainderSlot):
        value = examine(dist_opt, slot, value.detach().to(slot.device))
        if slot.write_and_compare(value):
            record_of(dist_opt).has_moved_params = True
    else:
        slot.write(value)


def sync_moved_params(dist_opt: Any) -> None:
    """Gather model parameters anew if restoring masters changed any bit of them on any rank.

    With remainders a parameter's bits are half of its master. Loading a master that another backend
    wrote may round a tie the other way; the other data-parallel ranks must see that too.
    """
    inner = dist_opt.optimizer
    coded = getattr(inner, "store_param_remainders", False)
    if is_hybrid(inner) or not coded or not is_precision_aware(dist_opt):
        return
    record = record_of(dist_opt)
    moved, record.has_moved_params = record.has_moved_params, False
    if collectives.highest([moved], dist_opt.data_parallel_group)[0]:
        for chunk in dist_opt.model_chunks:
            chunk.start_param_sync(force_sync=True)

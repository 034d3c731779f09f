"""The optimizer takes what was loaded: mostly it is in place already.

A loaded state dict belongs to the caller. It may be taken twice, and it keeps the values that were
loaded, although its tensors are the optimizer's own storage: before an update changes that, what is
still held of the dict gets memory of its own.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from vime_optim.errors import PlanError
from vime_optim.optimizer.record import record_of
from vime_optim.optimizer.slots import slots_of
from vime_optim.reshard.coded import load_shards
from vime_optim.reshard.engine import Destination
from vime_optim.reshard.layout import ParamLayout


def destinations_for(
    dist_opt: Any, loaded: Mapping[int, Any]
) -> dict[tuple[int, str], Destination] | None:
    """Where the pieces in `loaded` belong; None when it holds whole tensors, as Megatron's do.

    A loaded state may be taken again, also after the optimizer's storages were exchanged.
    """
    record = record_of(dist_opt)
    held: dict[tuple[int, str], Destination] | None = record.destinations
    if held is None:
        return None
    for (index, name), destination in held.items():
        if not destination.is_gathered:
            if isinstance((loaded.get(index) or {}).get(name), torch.Tensor):
                return None
            break
    if record.are_destinations_taken:
        held = {key: _renewed(dist_opt, key[1], held[key]) for key in held}
    record.are_destinations_taken = True
    return held


def _renewed(dist_opt: Any, name: str, old: Destination) -> Destination:
    if old.slot is None:
        return old
    slot = slots_of(dist_opt, old.layout.param)[name]
    direct = None if old.is_gathered else slot.direct()
    if direct is None or old.coded is not None:
        return replace(old, slot=slot)
    return replace(old, slot=slot, flat=direct.view(-1))


def lend(dist_opt: Any, loaded: Mapping[int, Any]) -> None:
    """Remember the tensors of a loaded state that are the optimizer's own storage.

    Whoever keeps the loaded state expects that it stays as it was loaded.
    """
    record = record_of(dist_opt)
    lent = []
    for (index, name), destination in (record.destinations or {}).items():
        pieces = (loaded.get(index) or {}).get(name)
        if destination.coded is None and isinstance(pieces, dict):
            lent += [weakref.ref(piece) for piece in pieces.values()]
    record.lent = lent


@torch.no_grad()
def give_back(dist_opt: Any) -> None:
    """Before an update: what somebody still holds of a loaded state gets memory of its own."""
    record = record_of(dist_opt)
    lent, record.lent = record.lent, []
    for reference in lent:
        piece = reference()
        if piece is not None:
            piece.data = piece.detach().clone()


@torch.no_grad()
def finish_load(
    destinations: Mapping[tuple[int, str], Destination], loaded: Mapping[int, Any], write: Any
) -> None:
    """Bring what was loaded into the optimizer: mostly it is there already; read coded states now.

    Args:
        loaded: param state as dist_checkpointing.load returned it.
        write: called as write(slot, value) for states that must be encoded.

    Raises:
        PlanError: a piece is missing from `loaded` or has another size.
        CheckpointError: a file cannot be read.
    """
    coded = []
    for (index, name), destination in destinations.items():
        found = (loaded.get(index) or {}).get(name)
        slot, layout = destination.slot, destination.layout
        if destination.is_gathered:
            if slot is not None:
                whole = _whole(found, destination, name)
                write(slot, whole[layout.start : layout.end])
            continue
        for number, piece in enumerate(destination.pieces):
            value = found.get(number) if isinstance(found, dict) else None
            _into(destination, destination.view(piece), value, name)
        assert slot is not None  # a cut parameter has a destination only where it is owned
        if destination.coded is None:
            slot.settle()
        else:
            coded.append((destination.coded, slot.device, functools.partial(write, slot)))
    load_shards(coded)


def _whole(found: Any, destination: Destination, name: str) -> torch.Tensor:
    layout = destination.layout
    if not isinstance(found, torch.Tensor) or found.numel() != layout.numel:
        raise _missing(layout, name, found)
    return found.reshape(-1)


def _into(destination: Destination, view: torch.Tensor, tensor: Any, name: str) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.numel() != view.numel():
        raise _missing(destination.layout, name, tensor)
    if destination.coded is not None:
        if tensor.device.type == "meta":
            return  # a placeholder still: its reads are noted
        view = destination.coded.real(view)
    if tensor.device != view.device or tensor.data_ptr() != view.data_ptr():
        view.copy_(tensor.view(view.shape))


def _missing(layout: ParamLayout, name: str, found: Any) -> PlanError:
    return PlanError(
        "a piece of optimizer state was not loaded",
        where=f"{name} of {layout.name}, elements [{layout.start}, {layout.end})",
        got=tuple(found.shape) if isinstance(found, torch.Tensor) else "nothing",
        expected="the pieces that this rank asked for",
        next_step="check the checkpoint with `vime-optim inspect`",
    )

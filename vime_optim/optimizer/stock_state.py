"""Is the optimizer state of a checkpoint that others wrote the state of its model?

Stock megatron-core writes some states under other parameters' names (F20), shifted behind padded
buckets (F26), or while training changed them (F19). Nothing in the file says so, but a master
parameter must round to the model's parameter, which is in the checkpoint too and is loaded first.
Of masters whose remainder was written in their place (F7) the parameter is the other half.
Files of ours carry MARK beside the param groups, where stock looks at nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Literal, get_args

import torch

from vime_optim import collectives
from vime_optim.errors import CheckpointError
from vime_optim.optimizer.kinds import (
    MASTER,
    optimizer_param,
    owned_params,
    param_name,
    stock_group_map,
)
from vime_optim.optimizer.record import record_of
from vime_optim.optimizer.slots import RemainderSlot, Slot, blocks, master_of, master_slot, slots_of

_BUCKET_ALIGN_NUMEL = 128
MARK = "vime_optim_states_by_name"
Fit = Literal["fits", "differs", "remainder"]

logger = logging.getLogger("vime_optim")


def examine(dist_opt: Any, slot: RemainderSlot, value: torch.Tensor) -> torch.Tensor:
    """Remember whether a master fits its parameter, before storing it changes the parameter.

    Returns:
        `value`, or the int16 remainders that stock wrote in its place.
    """
    if value.dtype == torch.int16:
        return value
    fit, remainders = _fit_of(value, slot.param)
    record_of(dist_opt).fits[id(slot.param)] = fit
    return value if remainders is None else remainders


def _fit_of(master: torch.Tensor, param: torch.Tensor) -> tuple[Fit, torch.Tensor | None]:
    if rounds_to(master, param):
        return "fits", None
    remainders = _remainders(master) if param.dtype == torch.bfloat16 else None
    return ("differs" if remainders is None else "remainder"), remainders


def _remainders(value: torch.Tensor) -> torch.Tensor | None:
    """The int16 remainders that a file holds as float32 in place of masters (F7), or None.

    No weights are all whole numbers, unless they are all 0 or 1, which needs no telling apart.
    """
    if not value.numel() or not bool(value[0] == value[0].round()):
        return None
    whole = (value == value.round()) & (value.abs() <= 0x8000)
    return value.to(torch.int16) if bool(whole.all()) else None


def rounds_to(master: torch.Tensor, param: torch.Tensor) -> bool:
    """Whether float32 masters round to 16-bit parameters; ties may have gone either way."""
    return all(bool((gap <= 1).all()) for _, gap in gaps(master, param))


def gaps(master: torch.Tensor, param: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Blocks of float32 masters, and how many representable values lie between each element,
    rounded, and its 16-bit parameter. Both 1-D, of one size, on any device."""
    for block, held in zip(blocks(master.detach()), blocks(param.detach()), strict=True):
        rounded = _ordered(block.to(held.dtype))
        yield block, (rounded - _ordered(held.to(block.device))).abs()


def _ordered(values: torch.Tensor) -> torch.Tensor:
    """16-bit floating values as integers that count representable values."""
    bits = values.contiguous().view(torch.int16).to(torch.int32)
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


@torch.no_grad()
def check_unmarked(dist_opt: Any) -> None:
    """Check loaded masters against the model; collective over the data-parallel group.

    Raises:
        CheckpointError: some masters are those of their parameters and some are not, or the file
            does not tell whether two states were exchanged.
    """
    record = record_of(dist_opt)
    noted, record.fits = record.fits, {}
    fits = dict(_fits(dist_opt, noted))
    exchanged = next(_may_be_exchanged(dist_opt), None)
    found = list(fits.values())
    counts = [*(found.count(fit) for fit in get_args(Fit)), int(exchanged is not None)]
    right, wrong, remainders, unclear = collectives.added(counts, dist_opt.data_parallel_group)
    where = next((name for name, fit in fits.items() if fit == "differs"), None)
    if wrong and not right:
        # Another model, or one that is loaded later: nothing can be said.
        logger.warning("vime_optim: no master parameter is that of the model; it is not checked")
    elif wrong:
        raise _refusal(
            "the checkpoint's master parameters are not those of its model",
            where,
            f"{wrong} of {right + wrong} shards of others",
        )
    elif unclear:
        raise _refusal(
            "the checkpoint does not tell whether states were exchanged",
            exchanged,
            "equal masters with different moments in a group of float32 and 16-bit parameters",
        )
    elif remainders and any(_is_shifted(buffer) for buffer in dist_opt.buffers):
        raise _refusal(
            "the checkpoint holds remainders of masters (F7), which stock shifts behind padding",
            None,
            "several buckets of which an earlier one is padded",
        )


def _is_shifted(buffer: Any) -> bool:
    """Whether stock shifts states of this buffer, with any number of ranks."""
    return any(bucket.numel_unpadded % _BUCKET_ALIGN_NUMEL for bucket in buffer.buckets[:-1])


def _fits(dist_opt: Any, noted: dict[int, Fit]) -> Iterator[tuple[str, Fit]]:
    """(parameter, whether its master fits), without those of which that means nothing.

    A master in whose place stock wrote its remainder is set right.
    """
    for model_param, ranges in owned_params(dist_opt):
        if model_param.dtype not in (torch.bfloat16, torch.float16):
            continue  # a float32 parameter is its own master
        if type(model_param) not in (torch.Tensor, torch.nn.Parameter):
            continue  # quantized
        slot = master_slot(dist_opt, model_param)
        part = model_param.detach().reshape(-1)[ranges["param"].start : ranges["param"].end]
        if isinstance(slot, RemainderSlot):
            fit = noted.get(id(slot.param))
        else:
            master = slot.read()
            fit, remainders = _fit_of(master, part)
            if remainders is not None:
                slot.write(master_of(part.to(master.device), remainders))
        # A parameter may be as it was created, also in a model that is not loaded yet.
        if fit and not (fit == "fits" and bool((part == part[0]).all())):
            yield param_name(dist_opt, model_param), fit


def _may_be_exchanged(dist_opt: Any) -> Iterator[str]:
    """Parameters whose states stock would exchange in this layout, if their masters are equal."""
    stock = stock_group_map(dist_opt)
    at = {place: param for param, place in dist_opt.model_param_group_index_map.items()}
    for param, place in stock.items():
        other = at.get(place, param)
        if other is param or not _same_size(dist_opt, param, other):
            continue
        here, there = slots_of(dist_opt, param), slots_of(dist_opt, other)
        moments = [name for name in here if name != MASTER]
        if _equal(here[MASTER], there[MASTER]) and not all(
            _equal(here[name], there[name]) for name in moments
        ):
            yield param_name(dist_opt, param)


def _same_size(dist_opt: Any, a: torch.Tensor, b: torch.Tensor) -> bool:
    return optimizer_param(dist_opt, a).numel() == optimizer_param(dist_opt, b).numel()


def _equal(a: Slot, b: Slot) -> bool:
    return torch.equal(a.read().cpu(), b.read().cpu())


def _refusal(what: str, where: str | None, got: str) -> CheckpointError:
    return CheckpointError(
        what,
        where=where,
        got=got,
        expected="masters that round to the model's parameters",
        next_step="stock megatron-core wrote states under other names, shifted, or while they"
        " changed (F19, F20, F26): load the model without the optimizer, or an earlier checkpoint."
        " VIME_OPTIM_SKIP=foreign leaves this check out",
    )

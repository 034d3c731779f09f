"""The step counter, wherever a backend keeps it.

torch's Adam keeps a tensor per parameter in `state`; Transformer Engine's and Apex's FusedAdam
keep one number per param group; Lion, Muon and SGD keep none, and must get none: it would be shown
to every reader of their param groups. HybridDeviceOptimizer has several optimizers of any sort.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vime_optim.errors import OptimizerStateError
from vime_optim.optimizer.kinds import (
    STATE_MASTER,
    counts_steps_in,
    is_apex,
    is_hybrid,
    sub_optimizers,
)


def read_step(inner: Any) -> int | None:
    """The number of steps taken, or None when nothing counts yet.

    A parameter that never got a gradient keeps the counter that a save or a load gave it. Its
    moments are all zero, and where counters disagree it has no say.

    Raises:
        OptimizerStateError: the counters of one optimizer disagree.
    """
    found = _found(inner, _counters)
    if len(found) > 1:
        found = _found(inner, _counters_of_stepped) or {max(found): ""}
    if len(found) > 1:
        raise OptimizerStateError(
            "the step counters of one optimizer disagree",
            got=", ".join(f"step {step} in {where}" for step, where in sorted(found.items())),
            expected="one step for all parameters, as Megatron stores a single one",
            next_step="this run was resumed wrongly before; load a checkpoint with vime_optim"
            " installed",
        )
    return next(iter(found), None)


def has_stepped(inner: Any) -> bool:
    """Whether any counter is above zero; counters that disagree are no matter here."""
    return any(step > 0 for part in sub_optimizers(inner) for step in _counters(part))


def _found(inner: Any, counters: Callable[[Any], set[int]]) -> dict[int, str]:
    """Each value of the counters, and one optimizer that has it."""
    found: dict[int, str] = {}
    for position, optimizer in enumerate(sub_optimizers(inner)):
        for step in counters(optimizer):
            found.setdefault(step, f"{type(optimizer).__name__} #{position}")
    return found


def _counters_of_stepped(optimizer: Any) -> set[int]:
    """As `_counters`, without the parameters whose moments are all zero."""
    if counts_steps_in(optimizer) != "states":
        return _counters(optimizer)
    return {int(s["step"]) for s in optimizer.state.values() if "step" in s and _has_moments(s)}


def _has_moments(state: dict[str, Any]) -> bool:
    return any(
        isinstance(value, torch.Tensor) and bool(value.count_nonzero())
        for name, value in state.items()
        if name not in ("step", STATE_MASTER)
    )


def _counters(optimizer: Any) -> set[int]:
    place = counts_steps_in(optimizer)
    if place == "states":
        return {int(s["step"]) for s in optimizer.state.values() if "step" in s}
    if place == "groups":
        # FusedAdam may not count the groups that are empty on this rank.
        return {int(g["step"]) for g in optimizer.param_groups if "step" in g and len(g["params"])}
    return set()


def write_step(inner: Any, step: int) -> None:
    """Set every counter to `step`, keeping each counter's dtype and device, sharing none.

    An optimizer that counts no steps loses those that Megatron gave it. One of an unknown class
    that has not counted yet gets them into its groups, where its own saves had them.
    """
    for optimizer in sub_optimizers(inner):
        place = counts_steps_in(optimizer)
        if place == "states":
            _write_native(optimizer, step)
        elif place == "nowhere":
            drop_steps(optimizer)
        else:
            _write_fused(optimizer, step)
    if is_hybrid(inner):
        # HybridDeviceOptimizer copies its groups over those of its parts before each step: a
        # counter there would freeze FusedAdam's for ever.
        for group in inner.param_groups:
            group.pop("step", None)


def drop_steps(optimizer: Any) -> None:
    """Remove the steps that Megatron put beside groups and moments of one that counts none."""
    for holder in (*optimizer.param_groups, *optimizer.state.values()):
        holder.pop("step", None)


def _write_native(optimizer: Any, step: int) -> None:
    for group in optimizer.param_groups:
        group.pop("step", None)
        for param in group["params"]:
            state = optimizer.state.get(param)
            if state:
                state["step"] = _native_step(group, param, state.get("step"), step)


def _native_step(group: dict[str, Any], param: torch.Tensor, old: Any, step: int) -> Any:
    if type(old) is int:
        return step  # as other classes than torch's keep it
    on_param = bool(group.get("capturable") or group.get("fused"))
    dtype = old.dtype if isinstance(old, torch.Tensor) else torch.float32
    # A number that torch would not make on the parameter's device stays on the host, also when
    # Megatron moved it.
    device = param.device if on_param else torch.device("cpu")
    return torch.full((), float(step), dtype=dtype, device=device)


def _write_fused(optimizer: Any, step: int) -> None:
    seen: set[int] = set()
    for group in optimizer.param_groups:
        if step == 0:
            group.pop("step", None)  # as before the first step, which makes the counter
        elif group["params"] or "step" in group or not is_apex(optimizer):
            group["step"] = _fused_step(optimizer, group, step, seen)
        for param in group["params"]:
            # Megatron puts a torch-style step beside FusedAdam's moments; it means nothing there.
            optimizer.state.get(param, {}).pop("step", None)


def _fused_step(optimizer: Any, group: dict[str, Any], step: int, seen: set[int]) -> Any:
    """A number, or with capturable an int32 tensor that is this group's alone.

    A tensor that is right already is filled in place: a CUDA graph may hold on to it.
    """
    old = group.get("step")
    if not getattr(optimizer, "capturable", isinstance(old, torch.Tensor)):
        return step
    holder = next(iter(group["params"]), getattr(optimizer, "_dummy_overflow_buf", old))
    if not isinstance(holder, torch.Tensor):
        return step
    if (
        not isinstance(old, torch.Tensor)
        or (old.dtype, old.device) != (torch.int, holder.device)
        or old.untyped_storage().data_ptr() in seen
    ):
        old = torch.zeros(1, dtype=torch.int, device=holder.device)
    seen.add(old.untyped_storage().data_ptr())
    return old.fill_(step)


@contextmanager
def steps_as_numbers(groups: list[dict[str, Any]]) -> Iterator[None]:
    """In this block, groups whose step is a tensor (capturable) hold it as a number.

    Tensors of one value are different keys of a set, and one tensor that several groups share
    would be advanced several times a step. A number that the block changes goes into the tensor.
    """
    held = [(g, g["step"]) for g in groups if isinstance(g.get("step"), torch.Tensor)]
    for group, tensor in held:
        group["step"] = int(tensor)
    try:
        yield
    finally:
        for group, tensor in held:
            if int(tensor) != group["step"]:
                tensor.fill_(group["step"])
            group["step"] = tensor

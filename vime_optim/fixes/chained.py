"""A checkpoint of another number of chained optimizers loads, and every one of them has its step.

Symptom: a MoE run saved with expert parallelism does not load without it, nor the other way; where
only some pipeline stages hold experts, their step is lost (F21).
Cause: dense and expert parameters have an optimizer each, or share one; the param groups are common
state, which rank 0 writes for all: in the shape that its own optimizers have, and without a step
where its own shard of them is empty.
Changes: where the shapes differ, every optimizer gets the groups that fit it from all that were
saved; an expert group that was not saved takes the hyperparameters and the step of the dense group
with the same multipliers. On a save the ranks agree on each optimizer's step; one that has none on
any rank is said to have none. On a load of a file that does not say so, groups without a step take
that of the others: all optimizers of a chain step together, and those that count no steps (Muon,
Lion) get none. Param state is told apart by its keys, and needs no change.
Leaves alone: every load whose shapes agree and whose groups have a step.
Remove when: Megatron keeps param groups by what they hold.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import torch

from vime_optim import collectives
from vime_optim.fixes.places import CHAINED_OPTIMIZER, in_save
from vime_optim.optimizer.groups_only import COUNTS, saved_step
from vime_optim.optimizer.kinds import counts_steps, has_buffers
from vime_optim.optimizer.matching import match_groups
from vime_optim.optimizer.stock_state import MARK
from vime_optim.probe import missing_parameters
from vime_optim.registry import NEEDED, Call, Diagnosis, Fix, Hit, not_understood
from vime_optim.state_dicts import Path, walk

_OWN = ("param_state", "param_state_sharding_type", "grad_scaler")
_PLACES = 64

FIX = Fix(
    id="chained",
    faults=("F21",),
    summary="a checkpoint of another number of chained optimizers loads, steps included",
    targets=(in_save("sharded_state_dict"),),
)


def _diagnose(module: ModuleType, original: Any) -> Diagnosis:
    reason = missing_parameters(original, "self", "state_dict")
    if reason or not hasattr(module, "param_group_identifier_keys"):
        return not_understood(reason or "no param_group_identifier_keys in the module")
    return NEEDED


@FIX.wraps(CHAINED_OPTIMIZER, "load_state_dict", _diagnose)
def _load_state_dict(original: Any, hit: Hit, self: Any, state_dict: Any) -> None:
    hit()
    if isinstance(state_dict, dict) and self.chained_optimizers:
        # A save records the sharding type there. Where a chain is all that was saved, Megatron
        # would count it among the members.
        state_dict = {k: v for k, v in state_dict.items() if k != "content_metadata"}
        state_dict = fit_chain(self.chained_optimizers, state_dict)
        _fill_steps(_lists_of_counting(self.chained_optimizers, state_dict))
    original(self, state_dict)


def agree_on_the_step(call: Call, hit: Hit) -> None:
    """Every group of an optimizer gets the optimizer's step, as a rank may hold none of its params.
    Collective where ranks may be of several pipeline stages."""
    parts = list(_counting_parts(call["sharded_state_dict"]))
    if parts:
        hit()
    steps = [saved_step(part["param_groups"]) for _, part in parts]
    if _has_stages():
        steps = _highest_anywhere([path for path, _ in parts], steps)
    for (_, part), step in zip(parts, steps, strict=True):
        if step is None:
            del part[COUNTS]  # no rank counts steps of it
        else:
            _fill_steps([part["param_groups"]], step)


def _lists_of_counting(optimizers: list[Any], state: dict[Any, Any]) -> list[list[Any]]:
    """Of a state dict in the shape of these optimizers, the groups of those that count steps,
    without those that were saved without one."""
    alone = len(optimizers) == 1
    entries = [state if alone else state.get(number) for number in range(len(optimizers))]
    return [
        groups
        for optimizer, part in zip(optimizers, map(_part_of, entries), strict=True)
        if _takes_step_from_groups(optimizer)
        and isinstance(groups := part.get("param_groups"), list)
        and not _says_no_step(part)
    ]


def _says_no_step(part: dict[str, Any]) -> bool:
    """Whether what an optimizer saved beside its param state is ours, and says that no rank had a
    step: it did not step yet, whatever moments it was given."""
    marked = bool(part.get(MARK)) and not part.get(COUNTS)
    return marked and saved_step(part.get("param_groups", [])) is None


def _takes_step_from_groups(optimizer: Any) -> bool:
    """Whether this member of a chain is a DistributedOptimizer that counts steps."""
    if not hasattr(optimizer, "ddp_config") or not has_buffers(optimizer):
        return False
    return counts_steps(optimizer.optimizer)


def _counting_parts(state: Any) -> Iterator[tuple[Path, dict[str, Any]]]:
    """What optimizers that count steps save beside param state, with its path, in whatever place
    the caller put it."""
    from vime_optim.reshard.engine import ParamState

    for path, value in walk(state, leaves=ParamState):
        held = getattr(value, "data", value)  # a ShardedObject, where every stage writes its own
        if not isinstance(held, dict):
            continue
        if held is not value:
            yield from ((path + inner, part) for inner, part in _counting_parts(held))
        elif value.get(COUNTS) and isinstance(value.get("param_groups"), list):
            yield path, value


def _fill_steps(lists: Iterable[list[dict[str, Any]]], step: int | None = None) -> None:
    """Give the step of the other groups to those without, in place."""
    groups = [group for groups in lists for group in groups]
    step = saved_step(groups) if step is None else step
    if step is not None:
        for group in groups:
            if group.get("step") is None:
                group["step"] = step


def _highest_anywhere(paths: list[Path], steps: list[int | None]) -> list[int | None]:
    """Collective: the highest step of each path on any rank.

    Ranks may hold different optimizers, so a path is one of a fixed number of places by its hash.
    Two that share a place share their step, as optimizers of a chain do.
    """
    places = [zlib.crc32(repr(path).encode()) % _PLACES for path in paths]
    own = [-1] * _PLACES
    for place, step in zip(places, steps, strict=True):
        own[place] = max(own[place], -1 if step is None else step)
    found = collectives.highest(own)
    return [found[place] if found[place] >= 0 else None for place in places]


def _has_stages() -> bool:
    """Whether ranks may be of several pipeline stages: a caller's own process groups tell nothing
    of it."""
    from megatron.core import parallel_state

    if not torch.distributed.is_initialized():
        return False
    if not parallel_state.model_parallel_is_initialized():
        return True
    return int(parallel_state.get_pipeline_model_parallel_world_size()) > 1


def fit_chain(optimizers: list[Any], state_dict: dict[Any, Any]) -> dict[Any, Any]:
    """`state_dict` in the shape of these optimizers; itself when it has that shape already."""
    count = len(optimizers)
    numbers = {key for key in state_dict if isinstance(key, int)}
    whole = "optimizer" in state_dict
    if (count == 1 and whole) or (count > 1 and not whole and numbers == set(range(count))):
        return state_dict
    entries = [state_dict, *(state_dict[key] for key in sorted(numbers))]
    saved = [group for part in _parts(entries) for group in part.get("param_groups", ())]
    if not saved:
        return state_dict
    if count == 1:
        return _entry(optimizers[0], state_dict, entries, saved)
    return {
        number: _entry(optimizer, state_dict.get(number, {}), entries, saved)
        for number, optimizer in enumerate(optimizers)
    }


def _entry(
    optimizer: Any, own: dict[Any, Any], entries: list[Any], saved: list[dict[str, Any]]
) -> dict[str, Any]:
    entry: dict[str, Any] = {key: own[key] for key in _OWN if key in own}
    for key in _OWN[1:]:
        for other in entries:
            if key not in entry and isinstance(other, dict) and key in other:
                entry[key] = other[key]
    inner = getattr(optimizer, "optimizer", None)
    groups = inner.param_groups if inner is not None else []
    entry["optimizer"] = {"param_groups": [dict(g) for g in match_groups(groups, saved)]}
    if all(part.get(MARK) for part in _parts(entries) if part.get("param_groups")):
        entry["optimizer"][MARK] = True
    if any(part.get(COUNTS) for part in _parts(entries)):
        entry["optimizer"][COUNTS] = True
    return entry


def _parts(entries: list[Any]) -> list[dict[str, Any]]:
    """What the optimizers of a chain saved beside param state."""
    return [_part_of(entry) for entry in entries if isinstance(entry, dict)]


def _part_of(entry: Any) -> dict[str, Any]:
    return (entry.get("optimizer") or {}) if isinstance(entry, dict) else {}

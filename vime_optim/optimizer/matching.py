"""Which saved param group belongs to which of the optimizer's.

A checkpoint keeps the hyperparameters of groups, not what is in them. Up to 0.18 Megatron tells
groups apart by four multipliers and flags, so that of two groups that differ in max_lr alone both
get the values of the last (F24). Here whatever tells the groups apart is compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from vime_optim.errors import CheckpointError

Group = dict[str, Any]

EXPERT = "is_expert_parallel"
_STRUCTURE = ("wd_mult", "lr_mult", EXPERT)
"""What no run changes on resume; groups that differ here are never paired."""

_FLAGS = ("is_decoupled_lr", "default_config")
"""How a group came about; they pair groups whose learning rates were changed for this run."""

_CHANGING = frozenset({"params", "step", "lr", "weight_decay"})
"""What training itself changes."""


def identifiers() -> tuple[str, ...]:
    """The keys by which the megatron-core that is there pairs param groups."""
    from megatron.core.optimizer import optimizer

    return tuple(getattr(optimizer, "param_group_identifier_keys", ()))


def match_groups(
    current: Sequence[Group], saved: Sequence[Group], identifiers: Sequence[str] = ()
) -> list[Group]:
    """The saved group of each current one, in the order of `current`, under current identities.

    Groups of the same multipliers are told apart by every key in which they differ, in any order.
    One that is left over on both sides is paired (its learning rate was changed for this run),
    unless the release compares that key too.

    Args:
        current: the optimizer's groups.
        saved: those of a checkpoint. An expert group that was not saved is taken from the dense
            group of the same multipliers, and the other way.
        identifiers: the keys that this release pairs groups by.

    Raises:
        CheckpointError: a group has no counterpart, or more than one.
    """
    pool = list(saved) + _of_the_other_kind(saved)
    by_class: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for position, group in enumerate(current):
        by_class[_structure(group)].append(position)
    found: dict[int, Group] = {}
    for structure, positions in by_class.items():
        candidates = [group for group in pool if _structure(group) == structure]
        mine = [current[position] for position in positions]
        if not candidates:
            raise _refusal("no saved param group fits one of the optimizer's", mine, saved)
        pairs = _pair(mine, candidates)
        found.update(zip(positions, pairs, strict=True))
    for position, group in enumerate(current):
        _check_identity(group, found[position], identifiers, saved)
    return [_with_identity(found[i], group, identifiers) for i, group in enumerate(current)]


def _of_the_other_kind(saved: Sequence[Group]) -> list[Group]:
    """Expert groups made of dense ones and the other way, where such a group was not saved."""
    known = {_structure(group) for group in saved}
    turned = [{**group, EXPERT: not group.get(EXPERT)} for group in saved if EXPERT in group]
    return [group for group in turned if _structure(group) not in known]


def _pair(current: list[Group], saved: list[Group]) -> list[Group]:
    keys = _telling_keys(current, saved)
    chosen: dict[int, int] = {}
    for number, group in enumerate(current):
        alike = [i for i, other in enumerate(saved) if _agree(group, other, keys)]
        if alike:
            twins = [n for n in range(number) if _agree(group, current[n], keys)]
            chosen[number] = _one_of(group, alike, len(twins), current, saved)
    taken = [saved[i] for i in chosen.values()]
    left = [
        i
        for i, group in enumerate(saved)
        if i not in chosen.values() and not any(_agree(group, other, keys) for other in taken)
    ]
    for number, group in enumerate(current):
        if number not in chosen:
            chosen[number] = _left_over(group, left, chosen, current, saved)
    return [saved[chosen[number]] for number in range(len(current))]


def _telling_keys(current: list[Group], saved: list[Group]) -> list[str]:
    """Keys in which the groups of either side differ, and which both sides have."""
    names = set.intersection(
        *({key for g in side for key in _keys(g)} for side in (current, saved))
    )
    return sorted(
        name
        for name in names - _CHANGING
        if any(len({repr(_value(g, name)) for g in side}) > 1 for side in (current, saved))
    )


def _one_of(
    group: Group, alike: list[int], rank: int, current: list[Group], saved: list[Group]
) -> int:
    """One of several saved groups that agree with `group`: by its present values, else by order."""
    for key in ("lr", "weight_decay"):
        alike = [i for i in alike if _agree(group, saved[i], (key,))] or alike
    if len({repr(_plain(saved[i])) for i in alike}) > 1:
        raise _refusal("several saved param groups fit one of the optimizer's", current, saved)
    return alike[min(rank, len(alike) - 1)]


def _left_over(
    group: Group,
    left: list[int],
    chosen: dict[int, int],
    current: list[Group],
    saved: list[Group],
) -> int:
    free = [i for i in left if i not in chosen.values()]
    rivals = [other for n, other in enumerate(current) if n not in chosen and other is not group]
    flagged = [i for i in free if _agree(group, saved[i], _FLAGS)]
    if len(flagged) == 1 and not any(_agree(group, rival, _FLAGS) for rival in rivals):
        return flagged[0]
    if len(free) == 1 and not rivals:
        return free[0]
    raise _refusal(
        "a param group of the optimizer has no counterpart among the saved ones, which a resume"
        " may have made alike"
        if len({repr(_plain(g)) for g in saved}) < len(saved)
        else "a param group of the optimizer has no counterpart among the saved ones",
        current,
        saved,
    )


def _check_identity(
    group: Group, found: Group, identifiers: Sequence[str], saved: Sequence[Group]
) -> None:
    lr = ("max_lr", "min_lr")
    for key in identifiers:
        # Releases up to 0.15 flag a decoupled learning rate, newer ones give the rate alone.
        if key == "is_decoupled_lr" and _agree(group, found, lr):
            continue
        if key in _keys(found) and not _agree(group, found, (key,)):
            raise _refusal(f"a saved param group has another {key}", [group], saved)


def _with_identity(found: Group, group: Group, identifiers: Sequence[str]) -> Group:
    return {**found, **{key: group[key] for key in (*identifiers, *_STRUCTURE) if key in group}}


def _structure(group: Group) -> tuple[Any, ...]:
    return tuple(_value(group, key) for key in _STRUCTURE)


def _agree(a: Group, b: Group, keys: Sequence[str]) -> bool:
    # By text, as a value may be a tuple here and a list in a file, and a tensor has no truth.
    return all(repr(_value(a, key)) == repr(_value(b, key)) for key in keys)


def _keys(group: Group) -> set[str]:
    return {str(key).removeprefix("pre_") for key in group}


def _value(group: Group, key: str) -> Any:
    value = group.get(key, group.get(f"pre_{key}"))  # NeMo writes some keys with a prefix
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return value.item()  # a learning rate under capturable
    return tuple(value) if isinstance(value, list) else value


def _plain(group: Group) -> Group:
    return {key: _value(group, key) for key in sorted(_keys(group) - {"params", "step", *_FLAGS})}


def _refusal(what: str, current: Sequence[Group], saved: Sequence[Group]) -> CheckpointError:
    return CheckpointError(
        what,
        got="; ".join(_describe(group) for group in saved) + " in the checkpoint",
        expected="; ".join(_describe(group) for group in current),
        next_step="load with the options of weight decay and learning rate that the checkpoint was"
        " saved with; if it was written after a resume that mixed groups up (F24), load an earlier"
        " one",
    )


def _describe(group: Group) -> str:
    shown = (*_STRUCTURE, *_FLAGS, "max_lr", "min_lr", "start_wd", "end_wd", "eps")
    return "{" + ", ".join(f"{k}={group[k]!r}" for k in shown if group.get(k) is not None) + "}"

"""A checkpoint of another number of chained optimizers loads.

Symptom: a MoE run saved with expert parallelism does not load without it, nor the other way; where
only some pipeline stages hold experts, their step is lost (F21).
Cause: dense and expert parameters have an optimizer each, or share one; the param groups are common
state, which rank 0 writes for all, in the shape that its own optimizers have.
Changes: where the shapes differ, every optimizer gets the groups that fit it from all that were
saved; an expert group that was not saved takes the hyperparameters and the step of the dense group
with the same multipliers. Param state is told apart by its keys, and needs no change.
Leaves alone: every load whose shapes agree.
Remove when: Megatron keeps param groups by what they hold.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from vime_optim.errors import CheckpointError
from vime_optim.probe import missing_parameters
from vime_optim.registry import NEEDED, Diagnosis, Fix, Hit, Target, not_understood

_EXPERT = "is_expert_parallel"
_OWN = ("param_state", "param_state_sharding_type", "grad_scaler")


def _wrap(original: Any, hit: Hit) -> Any:
    def load_state_dict(self: Any, state_dict: Any) -> None:
        hit()
        if isinstance(state_dict, dict) and self.chained_optimizers:
            state_dict = fit_chain(self.chained_optimizers, state_dict)
        original(self, state_dict)

    return load_state_dict


def fit_chain(optimizers: list[Any], state_dict: dict[Any, Any]) -> dict[Any, Any]:
    """`state_dict` in the shape of these optimizers; itself when it has that shape already."""
    count = len(optimizers)
    numbers = {key for key in state_dict if isinstance(key, int)}
    whole = "optimizer" in state_dict
    if (count == 1 and whole) or (count > 1 and not whole and numbers == set(range(count))):
        return state_dict
    entries = [state_dict, *(state_dict[key] for key in sorted(numbers))]
    saved = [
        group
        for entry in entries
        if isinstance(entry, dict)
        for group in (entry.get("optimizer") or {}).get("param_groups", ())
    ]
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
    entry["optimizer"] = {"param_groups": [_fitting(group, saved) for group in groups]}
    return entry


def _fitting(group: dict[str, Any], saved: list[dict[str, Any]]) -> dict[str, Any]:
    wanted = _identity(group)
    for candidate in saved:
        if _identity(candidate) == wanted:
            return candidate
    for candidate in saved:
        if _identity({**candidate, _EXPERT: group.get(_EXPERT)}) == wanted:
            return {**candidate, _EXPERT: group.get(_EXPERT)}
    raise CheckpointError(
        "no saved param group fits one of the optimizer's",
        got="; ".join(str(_identity(candidate)) for candidate in saved),
        expected=str(wanted),
        next_step="load with the same weight decay and learning rate multipliers",
    )


def _identity(group: dict[str, Any]) -> tuple[Any, ...]:
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    # NeMo writes some of these keys with a prefix.
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in param_group_identifier_keys)


def _diagnose(module: ModuleType, original: Any) -> Diagnosis:
    reason = missing_parameters(original, "self", "state_dict")
    if reason or not hasattr(module, "param_group_identifier_keys"):
        return not_understood(reason or "no param_group_identifier_keys in the module")
    return NEEDED


FIXES = (
    Fix(
        id="chained",
        faults=("F21",),
        summary="a checkpoint of another number of chained optimizers loads",
        targets=(
            Target(
                "megatron.core.optimizer.optimizer",
                "ChainedOptimizer.load_state_dict",
                _wrap,
                _diagnose,
            ),
        ),
    ),
)

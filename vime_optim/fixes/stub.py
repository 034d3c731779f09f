"""A chained optimizer may have a child without parameters.

Symptom: only the experts are trained, and a save dies with `'NoneType' object has no attribute
'param_groups'` (F23); in the `torch` format a save or load of the parameter states dies too.
Cause: where nothing of the dense model is trained, its optimizer is a stub around None. Its step()
knows that; its state_dict() and the chain's _synchronize_steps() do not.
Changes: a stub saves a state without param groups, or an empty one, and loads nothing; steps are
synchronized among the others, whose group decides which ranks write.
Leaves alone: optimizers with parameters on any rank; these are no stubs on the ranks without.
Remove when: stubs have a state dict.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vime_optim.fixes.places import DISTRIBUTED, OPTIMIZER, STATE_DICT
from vime_optim.optimizer.kinds import is_stub
from vime_optim.registry import Fix, Hit, Target, Wrap, takes


def empty_state() -> dict[str, Any]:
    """What a stub saves: its place in the chain, so that the others keep theirs."""
    return {"optimizer": {"param_groups": []}}


def holds_nothing(optimizer: Any, hit: Hit) -> bool:
    if is_stub(optimizer):
        hit()
        return True
    return False


def _wrap_sharded(original: Any, hit: Hit) -> Any:
    def sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        return empty_state() if holds_nothing(self, hit) else original(self, *args, **kwargs)

    return sharded_state_dict


def _wrap_nothing(original: Any, hit: Hit) -> Any:
    """Serves what a stub has nothing to do for: every load, and a save to a file of its own."""

    def nothing(self: Any, *args: Any, **kwargs: Any) -> None:
        if is_stub(self):
            hit()
        else:
            original(self, *args, **kwargs)

    return nothing


def _wrap_gather(original: Any, hit: Hit) -> Any:
    def get_parameter_state_dp_zero(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_stub(self):
            return original(self, *args, **kwargs)
        hit()
        group = self.__dict__.get("data_parallel_group")
        return {} if group is None or group.rank() == 0 else None

    return get_parameter_state_dp_zero


def _wrap_parameter_state(original: Any, hit: Hit) -> Any:
    """Serves the save and the load of a chain. Each optimizer keeps its place in the file."""

    def parameter_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        stubs = [member for member in self.chained_optimizers if is_stub(member)]
        groups = [
            member.data_parallel_group
            for member in self.chained_optimizers
            if not is_stub(member) and hasattr(member, "data_parallel_group")
        ]
        if not stubs:
            return original(self, *args, **kwargs)
        if not groups:
            with _without_stubs(self, hit):
                return original(self, *args, **kwargs)
        hit()
        for stub in stubs:
            stub.data_parallel_group = groups[0]
        try:
            return original(self, *args, **kwargs)
        finally:
            for stub in stubs:
                del stub.data_parallel_group

    return parameter_state


def _wrap_on_the_others(original: Any, hit: Hit) -> Any:
    def on_the_others(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _without_stubs(self, hit):
            return original(self, *args, **kwargs)

    return on_the_others


@contextmanager
def _without_stubs(chain: Any, hit: Hit) -> Iterator[None]:
    everyone = chain.chained_optimizers
    others = [optimizer for optimizer in everyone if not is_stub(optimizer)]
    if len(others) < len(everyone):
        hit()
    chain.chained_optimizers = others
    try:
        yield
    finally:
        chain.chained_optimizers = everyone


def _target(name: str, wrap: Wrap, *needed: str) -> Target:
    return Target(DISTRIBUTED, f"DistributedOptimizer.{name}", wrap, takes("self", *needed))


FIX = Fix(
    id="stub",
    faults=("F23",),
    summary="a chained optimizer without parameters is saved and loaded as nothing",
    targets=(
        Target(DISTRIBUTED, "DistributedOptimizer.state_dict", STATE_DICT, takes("self")),
        Target(
            DISTRIBUTED,
            "DistributedOptimizer.sharded_state_dict",
            _wrap_sharded,
            takes("self", "model_sharded_state_dict"),
        ),
        _target("load_state_dict", _wrap_nothing, "state_dict"),
        _target("get_parameter_state_dp_zero", _wrap_gather),
        _target("save_parameter_state", _wrap_nothing, "filename"),
        _target("load_parameter_state", _wrap_nothing, "filename"),
        _target("load_parameter_state_from_dp_zero", _wrap_nothing, "state_dict"),
        *(
            Target(
                OPTIMIZER,
                f"ChainedOptimizer.{name}",
                _wrap_parameter_state,
                takes("self", "filename"),
            )
            for name in ("save_parameter_state", "load_parameter_state")
        ),
        Target(
            OPTIMIZER,
            "ChainedOptimizer._synchronize_steps",
            _wrap_on_the_others,
            takes("self"),
        ),
    ),
    after=("step", "foreign", "canonical-master", "sharding"),
)

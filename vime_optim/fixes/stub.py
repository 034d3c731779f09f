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

from vime_optim.fixes.places import CHAINED_OPTIMIZER, DISTRIBUTED_OPTIMIZER, in_state_dict
from vime_optim.optimizer.kinds import is_stub
from vime_optim.registry import Fix, Hit, takes

_FILE_OF_ITS_OWN = ("save_parameter_state", "load_parameter_state")

FIX = Fix(
    id="stub",
    faults=("F23",),
    summary="a chained optimizer without parameters is saved and loaded as nothing",
    targets=(in_state_dict(),),
    after=("step", "foreign", "canonical-master", "sharding"),
)


def empty_state() -> dict[str, Any]:
    """What a stub saves: its place in the chain, so that the others keep theirs."""
    return {"optimizer": {"param_groups": []}}


def holds_nothing(optimizer: Any, hit: Hit) -> bool:
    if is_stub(optimizer):
        hit()
        return True
    return False


@FIX.wraps(DISTRIBUTED_OPTIMIZER, "sharded_state_dict", takes("self", "model_sharded_state_dict"))
def _sharded_state_dict(original: Any, hit: Hit, self: Any, *args: Any, **kwargs: Any) -> Any:
    return empty_state() if holds_nothing(self, hit) else original(self, *args, **kwargs)


@FIX.wraps(DISTRIBUTED_OPTIMIZER, "load_state_dict", takes("self", "state_dict"))
@FIX.wraps(DISTRIBUTED_OPTIMIZER, _FILE_OF_ITS_OWN, takes("self", "filename"))
@FIX.wraps(DISTRIBUTED_OPTIMIZER, "load_parameter_state_from_dp_zero", takes("self", "state_dict"))
def _nothing(original: Any, hit: Hit, self: Any, *args: Any, **kwargs: Any) -> None:
    """Serves what a stub has nothing to do for: every load, and a save to a file of its own."""
    if is_stub(self):
        hit()
    else:
        original(self, *args, **kwargs)


@FIX.wraps(DISTRIBUTED_OPTIMIZER, "get_parameter_state_dp_zero", takes("self"))
def _gather(original: Any, hit: Hit, self: Any, *args: Any, **kwargs: Any) -> Any:
    if not is_stub(self):
        return original(self, *args, **kwargs)
    hit()
    group = self.__dict__.get("data_parallel_group")
    return {} if group is None or group.rank() == 0 else None


@FIX.wraps(CHAINED_OPTIMIZER, _FILE_OF_ITS_OWN, takes("self", "filename"))
def _parameter_state(original: Any, hit: Hit, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Serves the save and the load of a chain. Each optimizer keeps its place in the file."""
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


@FIX.wraps(CHAINED_OPTIMIZER, "_synchronize_steps", takes("self"))
def _on_the_others(original: Any, hit: Hit, self: Any, *args: Any, **kwargs: Any) -> Any:
    with _without_stubs(self, hit):
        return original(self, *args, **kwargs)


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

"""A chained optimizer may have a child without parameters.

Symptom: only the experts are trained, and a save dies with `'NoneType' object has no attribute
'param_groups'` (F23).
Cause: where nothing of the dense model is trained, its optimizer is a stub around None. Its step()
knows that; its state_dict() and the chain's _synchronize_steps() do not.
Changes: a stub saves a state without param groups and loads nothing; steps are synchronized among
the others.
Leaves alone: optimizers with parameters on any rank; these are no stubs on the ranks without.
Remove when: stubs have a state dict.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vime_optim.backends.kinds import is_stub
from vime_optim.registry import Fix, Hit, Target, takes


def empty_state() -> dict[str, Any]:
    """What a stub saves: its place in the chain, so that the others keep theirs."""
    return {"optimizer": {"param_groups": []}}


def _wrap_state_dict(original: Any, hit: Hit) -> Any:
    """Serves state_dict() and sharded_state_dict()."""

    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_stub(self):
            return original(self, *args, **kwargs)
        hit()
        return empty_state()

    return state_dict


def _wrap_load_state_dict(original: Any, hit: Hit) -> Any:
    def load_state_dict(self: Any, state_dict: Any) -> None:
        if is_stub(self):
            hit()
        else:
            original(self, state_dict)

    return load_state_dict


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


_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer"
_OPTIMIZER = "megatron.core.optimizer.optimizer"


FIXES = (
    Fix(
        id="stub",
        faults=("F23",),
        summary="a chained optimizer without parameters is saved and loaded as nothing",
        targets=(
            Target(
                _DISTRIBUTED, "DistributedOptimizer.state_dict", _wrap_state_dict, takes("self")
            ),
            Target(
                _DISTRIBUTED,
                "DistributedOptimizer.sharded_state_dict",
                _wrap_state_dict,
                takes("self", "model_sharded_state_dict"),
            ),
            Target(
                _DISTRIBUTED,
                "DistributedOptimizer.load_state_dict",
                _wrap_load_state_dict,
                takes("self", "state_dict"),
            ),
            Target(
                _OPTIMIZER,
                "ChainedOptimizer._synchronize_steps",
                _wrap_on_the_others,
                takes("self"),
            ),
        ),
    ),
)

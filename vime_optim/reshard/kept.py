"""Keeps a caller's template usable after a load, for the optimizer's template to be built from it.

Megatron's load exchanges factories of the template for what they build, in place, and a
fully-parallel load gives its ShardedTensors other data. A caller that loads the model and then asks
the optimizer for a template with the same description of the model (verl, with a folder for each)
is told that every parameter is missing.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def described(template: Any) -> Iterator[Any]:
    """A template to give to Megatron's load: containers of its own, the caller's leaves.

    Afterwards each leaf that described a parameter has that parameter as its data again.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    parameters = [
        (leaf, leaf.data)
        for leaf in _leaves(template)
        if isinstance(leaf, (ShardedTensor, ShardedTensorFactory))
        and isinstance(leaf.data, torch.nn.Parameter)
    ]
    try:
        yield _containers(template)
    finally:
        for leaf, data in parameters:
            leaf.data = data


def _containers(state: Any) -> Any:
    if isinstance(state, dict):
        own = copy.copy(state)
        for key, value in state.items():
            own[key] = _containers(value)
        return own
    if isinstance(state, list):
        return [_containers(value) for value in state]
    return state


def _leaves(state: Any) -> Iterator[Any]:
    if isinstance(state, (dict, list)):
        for value in state.values() if isinstance(state, dict) else state:
            yield from _leaves(value)
    else:
        yield state

"""Keeps a caller's template usable after a load, for the optimizer's template to be built from it.

Megatron's load exchanges factories of the template for what they build, in place, and a
fully-parallel load gives its ShardedTensors other data. A caller that loads the model and then asks
the optimizer for a template with the same description of the model (verl, with a folder for each)
is told that every parameter is missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from vime_optim.state_dicts import copied, walk


@contextlib.contextmanager
def described(template: Any) -> Iterator[Any]:
    """A template to give to Megatron's load: containers of its own, the caller's leaves.

    Afterwards each leaf that described a parameter has that parameter as its data again.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    parameters = [
        (leaf, leaf.data)
        for _, leaf in walk(template)
        if isinstance(leaf, (ShardedTensor, ShardedTensorFactory))
        and isinstance(leaf.data, torch.nn.Parameter)
    ]
    try:
        yield copied(template)
    finally:
        for leaf, data in parameters:
            leaf.data = data

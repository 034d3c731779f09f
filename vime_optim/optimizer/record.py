"""What we noted about an optimizer of Megatron: all in one place, kept in the optimizer.

In an attribute of it, so that it lives as long, and is copied with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

_ATTRIBUTE = "_vime_optim_record"


@dataclass
class Record:
    """Parameters are told by their id."""

    is_canonical: bool = False  # its states are to be read as float32 values now
    is_group_map_right: bool = False  # its map of parameters to param groups has been looked at
    stock_group_map: dict[torch.Tensor, tuple[int, int]] | None = None  # as Megatron made it, wrong
    has_moved_params: bool = False  # restoring a master changed bits of its parameter here
    # Fingerprints of the parameters that restored remainders belong to.
    restored: dict[int, tuple[int, int]] = field(default_factory=dict)
    fits: dict[int, Any] = field(default_factory=dict)  # whether a master fitted its parameter
    cannot_be_fully: bool = False  # fully_reshardable was found unable to describe it
    half_loaded_from: str | None = None  # the checkpoint that was read into it and not yet taken
    # Where what is loaded belongs, from its last template on, and whether it took that.
    destinations: dict[tuple[int, str], Any] | None = None
    are_destinations_taken: bool = False
    # Tensors of a loaded state that are its own storage.
    lent: list[weakref.ref[torch.Tensor]] = field(default_factory=list)


def record_of(optimizer: Any) -> Record:
    """The record of an optimizer (not: of a class around it), made when first asked for."""
    record: Record = optimizer.__dict__.setdefault(_ATTRIBUTE, Record())
    return record


@contextmanager
def canonical(dist_opt: Any) -> Iterator[None]:
    """States of this optimizer are read as float32 values in this block."""
    record = record_of(dist_opt)
    record.is_canonical = True
    try:
        yield
    finally:
        record.is_canonical = False

"""What ranks tell one another: few numbers, or small objects, over a process group (None: all)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def device_of(group: Any = None) -> torch.device:
    """Where tensors must lie for the group's backend."""
    backend = str(torch.distributed.get_backend(group))
    if "nccl" in backend:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def added(values: Sequence[int], group: Any = None) -> list[int]:
    """Collective: the sum of each number over the ranks, modulo 2**64, signed."""
    sums = torch.tensor(values, dtype=torch.int64, device=device_of(group))
    torch.distributed.all_reduce(sums, group=group)
    return sums.tolist()


def highest(values: Sequence[int], group: Any = None) -> list[int]:
    """Collective: the highest of each number on any rank."""
    found = torch.tensor(values, dtype=torch.int64, device=device_of(group))
    torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX, group=group)
    return found.tolist()


def gathered(value: Any, group: Any = None) -> list[Any]:
    """Collective: each rank's object, pickled; in the order of the group's ranks."""
    values: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(values, value, group=group)
    return values

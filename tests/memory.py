"""How much memory code asks for, counted, not sampled: the same on an idle and on a busy machine.

What Python and numpy allocate is counted by tracemalloc, in every thread. What torch allocates for
the result of an operation is counted by the storages themselves, in the thread that counts. The
resident set of a process, by contrast, holds what malloc keeps for later, and how much that is
depends on which threads happened to run at the same time.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vime_optim.simulate.memory import Ledger


class Counted:
    """`peak_bytes`: the most that was held at once; each side's own peak, added up."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.traced_bytes = 0

    @property
    def peak_bytes(self) -> int:
        return self.traced_bytes + self.ledger.peak_bytes


class _Storages(TorchDispatchMode):
    """Puts the storage of every result that is none of an argument's into the ledger."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            if tensor.device.type == "cpu" and tensor.untyped_storage()._cdata not in given:
                self._ledger.add(tensor.untyped_storage())
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [
        leaf
        for leaf in tree_leaves(tree)
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    ]


@contextmanager
def counted() -> Iterator[Counted]:
    """Counts what is allocated in the block, beyond what is held when it begins.

    Where other threads allocate meanwhile, start tracemalloc before and leave it on: stopped while
    one of them waits in it, CPython 3.11 crashes (python/cpython#128679).
    """
    found = Counted()
    with _Storages(Ledger()):
        torch.empty(1)  # torch imports what a mode needs with the first one
    gc.collect()
    kept_on = tracemalloc.is_tracing()
    if not kept_on:
        tracemalloc.start()
    tracemalloc.reset_peak()
    held_bytes = tracemalloc.get_traced_memory()[0]
    try:
        with _Storages(found.ledger):
            yield found
    finally:
        found.traced_bytes = tracemalloc.get_traced_memory()[1] - held_bytes
        if not kept_on:
            tracemalloc.stop()


@contextmanager
def at_most(limit_bytes: int) -> Iterator[None]:
    """Fails when the block holds more than this at once, also where it ends in another error."""
    try:
        with counted() as memory:
            yield
    finally:
        held_bytes = memory.peak_bytes
        assert held_bytes <= limit_bytes, f"{held_bytes:,} bytes, {limit_bytes:,} allowed"

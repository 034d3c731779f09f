"""Tensors are read from their files straight into place, by several threads.

Symptom: a load runs hosts out of memory, and takes minutes (F11).
Cause: torch's reader unpickles every chunk into a tensor of its own, one after the other.
Changes: the reader that Megatron's load makes gets our read_data (reshard/storage), which finds the
elements of each chunk in its file.
Leaves alone: readers and files that are not understood; torch's own code reads them.
Remove when: torch reads in place.
"""

from __future__ import annotations

from typing import Any

from vime_optim.fixes.places import TORCH_STRATEGY
from vime_optim.registry import Fix, Hit, takes

FIX = Fix(
    id="read-in-place",
    faults=("F11",),
    summary="tensors are read from their files straight into place, by several threads",
)


@FIX.wraps(TORCH_STRATEGY, "_get_filesystem_reader", takes("checkpoint_dir"))
def _get_filesystem_reader(original: Any, hit: Hit, *args: Any, **kwargs: Any) -> Any:
    from vime_optim.reshard import storage

    reader = original(*args, **kwargs)
    if storage.is_understood(reader):
        hit()
        storage.take_over(reader)
    return reader

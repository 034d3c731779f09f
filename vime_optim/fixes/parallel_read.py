"""A rank reads its part of a checkpoint with several threads.

Symptom: a load takes several times as long as plain reads of the same bytes.
Cause: torch DCP reads one item after the other, each into a fresh tensor that it then copies.
Changes: the items of a plan are handed to `read_data` one at a time from several threads; what they
hold at the same moment is bounded.
Leaves alone: how an item is read, checked and stored; the order does not matter to Megatron's
planner, except where shapes may differ, and those items stay in one thread.
Remove when: torch's FileSystemReader reads in parallel.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from vime_optim.registry import Fix, Hit, Target

MAX_THREADS = 8
IN_FLIGHT_SHARE = 0.03
"""Part of the bytes to read that may be held outside their destination, at least one item."""


class _Budget:
    """Lets threads in while what they hold fits; a single item always does."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._changed = threading.Condition()

    def take(self, size_bytes: int) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: not self._held_bytes or self._held_bytes + size_bytes <= self._limit_bytes
            )
            self._held_bytes += size_bytes

    def give(self, size_bytes: int) -> None:
        with self._changed:
            self._held_bytes -= size_bytes
            self._changed.notify_all()


def threads_of_rank() -> int:
    """Threads that this rank may use: its part of the processors of the node."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or torch.cuda.device_count() or 1)
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // ranks))


def _wrap_read(original: Callable[..., Any], hit: Hit) -> Any:
    def read_data(self: Any, plan: Any, planner: Any) -> Any:
        threads = threads_of_rank()
        may_differ = getattr(planner, "allow_shape_mismatch_sharded_tensors", None) or {}
        apart = [item for item in plan.items if not may_differ and math.prod(item.lengths) > 1]
        if threads == 1 or len(apart) < 2:
            return original(self, plan, planner)
        hit()
        chosen = {id(item) for item in apart}
        rest = [item for item in plan.items if id(item) not in chosen]
        result = original(self, replace(plan, items=rest), planner)
        sizes = [(self.storage_data[item.storage_index].length, item) for item in apart]
        budget = _Budget(int(IN_FLIGHT_SHARE * sum(size for size, _ in sizes)))
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        def read(job: tuple[int, Any]) -> None:
            size_bytes, item = job
            budget.take(size_bytes)
            try:
                if device is not None:
                    torch.cuda.set_device(device)
                original(self, replace(plan, items=[item]), planner)
            finally:
                budget.give(size_bytes)

        with ThreadPoolExecutor(threads, thread_name_prefix="vime_optim_read") as pool:
            for done in [pool.submit(read, job) for job in sizes]:
                done.result()
        return result

    return read_data


FIXES = (
    Fix(
        id="parallel-read",
        faults=("F11",),
        summary="a rank reads its part of a checkpoint with several threads",
        targets=(
            Target(
                "megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader",
                "CachedMetadataFileSystemReader.read_data",
                _wrap_read,
                optional=True,
            ),
        ),
    ),
)

"""Tags that survive copying, saving and sending a storage."""

from __future__ import annotations

import functools
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions

from vime_optim.simulate.attributes import Patches
from vime_optim.simulate.memory import set_storage_memory, storage_memory

_registered = False


def rebuild_on_device(
    rebuild: Callable[..., torch.UntypedStorage], args: tuple[Any, ...]
) -> torch.UntypedStorage:
    """Rebuilds a storage that another process sent, as device memory (CUDA IPC in real life)."""
    storage = rebuild(*args)
    set_storage_memory(storage, "device")
    return storage


def _reduce_storage(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    reduced: tuple[Any, ...] = reductions.reduce_storage(storage)  # type: ignore[no-untyped-call]
    if storage_memory(storage) == "device":
        return (rebuild_on_device, reduced)
    return reduced


def _location(storage: Any) -> str | None:
    untyped = getattr(storage, "_untyped_storage", storage)
    return "cuda:0" if storage_memory(untyped) == "device" else None


def _restore(is_enabled: Callable[[], bool], storage: Any, location: str) -> Any:
    if not is_enabled() or not location.startswith("cuda"):
        return None
    set_storage_memory(getattr(storage, "_untyped_storage", storage), "device")
    return storage


def apply(patches: Patches, is_enabled: Callable[[], bool]) -> None:
    global _registered
    original_clone = torch.UntypedStorage.clone

    def clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
        """copy.deepcopy of a tensor clones its storage without any tensor operator."""
        copied: torch.UntypedStorage = original_clone(self)  # type: ignore[no-untyped-call]
        if storage_memory(self) == "device":
            set_storage_memory(copied, "device")
        return copied

    patches.set(torch.UntypedStorage, "clone", clone)
    ForkingPickler.register(torch.UntypedStorage, _reduce_storage)
    if not _registered:
        # Asked before torch's own entry for the CPU, whose priority is 10. There is no way to
        # take an entry out again: with the simulation off it answers None.
        torch.serialization.register_package(5, _location, functools.partial(_restore, is_enabled))
        _registered = True

"""Host memory that cannot be pinned stays pageable.

Symptom: no run at all with CPU offload where memory cannot be pinned.
Cause: pin_memory() raises there, and Megatron has no way to decline it.
Changes: what cannot be pinned stays pageable, with one warning.
Leaves alone: machines that pin memory.
Remove when: Megatron goes on without pinning.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vime_optim.fixes.places import HYBRID_OPTIMIZER
from vime_optim.registry import Fix, Hit, takes

FIX = Fix(
    id="pageable",
    faults=(),
    summary="host memory that cannot be pinned stays pageable, with one warning",
)


@FIX.wraps(HYBRID_OPTIMIZER, "_get_sub_optimizer_param_groups", takes("self"))
def _split_groups(original: Any, hit: Hit, self: Any, *args: Any, **kwargs: Any) -> Any:
    hit()
    with _pinning_or_pageable():
        return original(self, *args, **kwargs)


@contextmanager
def _pinning_or_pageable() -> Iterator[None]:
    """Tensor.pin_memory gives back the pageable tensor where memory cannot be pinned.

    The method is replaced for the time of one optimizer's construction, since Megatron calls it
    without a way to decline.
    """
    pin_memory = torch.Tensor.pin_memory

    def tolerant(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        try:
            return pin_memory(tensor, *args, **kwargs)
        except RuntimeError as error:
            _warn_pageable(error)
            return tensor

    torch.Tensor.pin_memory = tolerant  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign]


@FIX.wraps(HYBRID_OPTIMIZER, "_set_sub_optimizer_grads", takes("self"))
def _set_grads(original: Any, hit: Hit, self: Any) -> None:
    hit()
    try:
        original(self)
    except RuntimeError as error:
        if not self.pin_cpu_grads:
            raise
        # Once more without pinning: every copy that was made is simply made again. An error
        # of another cause comes back the same.
        self.pin_cpu_grads = False
        try:
            original(self)
        except RuntimeError:
            self.pin_cpu_grads = True
            raise
        _warn_pageable(error)


_warned_pageable = False


def _warn_pageable(error: RuntimeError) -> None:
    global _warned_pageable
    if not _warned_pageable:
        _warned_pageable = True
        warnings.warn(
            "vime_optim: host memory cannot be pinned here; optimizer state stays pageable and"
            f" copies to the device are slower ({str(error).splitlines()[0]})",
            stacklevel=3,
        )

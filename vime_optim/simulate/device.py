"""A simulated CUDA device on a CPU: each storage is tagged as device or host memory.

It lets the whole of megatron-core (DDP, DistributedOptimizer, HybridDeviceOptimizer,
dist_checkpointing) run under gloo without a GPU. For tests and `vime-optim verify`; never active in
training. There is one device, `cuda:0`, per process; `torch.cuda.is_available()` stays False.
The random generator of the simulated device is torch's CPU generator.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from vime_optim.simulate import backward, cuda_api, sharing
from vime_optim.simulate.attributes import Patches
from vime_optim.simulate.memory import LEDGER, is_device_tensor
from vime_optim.simulate.modes import DeviceArguments, Inheritance, set_pin_fails

__all__ = ["LEDGER", "disable", "enable", "fail_pinning", "is_device_tensor", "is_enabled"]

_PATCHES = Patches()
_ENABLED = False
_LOCAL = threading.local()


def is_enabled() -> bool:
    """True between enable() and disable() in this process."""
    return _ENABLED


def enable() -> None:
    """Switches the simulation on in this process, in this thread and in every thread started later.

    Call it before megatron is imported, or right after. Calling it twice is a no-op.
    """
    global _ENABLED
    if _ENABLED:
        return
    # Compiled functions would bypass the modes, and would need a C++ compiler at run time.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    cuda_api.apply(_PATCHES)
    backward.apply(_PATCHES)
    sharing.apply(_PATCHES, is_enabled)
    _patch_threads()
    _enter()
    _ENABLED = True


def disable() -> None:
    """Undoes enable(). Threads that are still running keep their modes. For tests."""
    global _ENABLED
    if not _ENABLED:
        return
    _ENABLED = False
    for mode in reversed(_LOCAL.modes):
        mode.__exit__(None, None, None)
    _LOCAL.modes = []
    set_pin_fails(False)
    _PATCHES.undo()


def fail_pinning(fails: bool) -> None:
    """Makes every attempt to pin memory raise RuntimeError, as on a host without an accelerator."""
    set_pin_fails(fails)


def _enter() -> None:
    _LOCAL.modes = [Inheritance(), DeviceArguments()]  # type: ignore[no-untyped-call]
    for mode in _LOCAL.modes:
        mode.__enter__()


def _patch_threads() -> None:
    # torch's modes are local to a thread. `run` is what subclasses replace, so wrap its caller.
    original = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def bootstrap(self: threading.Thread) -> Any:
        if _ENABLED:
            _enter()
        return original(self)

    _PATCHES.set(threading.Thread, "_bootstrap_inner", bootstrap)

"""What training frameworks put over Megatron's methods, where a fix of ours does the same and more.

Such a function is told by the module that defines it and its name, and only as an override of the
method that it is known to override. It is no conflict: the fix takes its place, whichever of the
two comes first, and uninstall() gives it back. Every other override is a conflict.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Workaround:
    """A function of a framework that overrides one of Megatron's methods while it is imported.

    The fix that targets the method must replace it, not wrap it: the framework keeps no way back
    to Megatron's own.
    """

    framework: str
    modules: tuple[str, ...]
    """Where releases of the framework define it."""
    function: str
    target: str
    """Dotted path of the method that it overrides."""


KNOWN = (
    Workaround(
        framework="SkyRL",
        modules=(
            "skyrl.backends.skyrl_train.distributed.megatron.megatron_strategy",
            "skyrl_train.distributed.megatron.megatron_strategy",  # up to 0.4
        ),
        function="_patched_update_fp32_params_by_new_state",
        target="megatron.core.optimizer.cpu_offloading.hybrid_optimizer"
        ".HybridDeviceOptimizer._update_fp32_params_by_new_state",
    ),
)

MODULES = tuple(sorted({module for known in KNOWN for module in known.modules}))
"""Modules that override methods of Megatron while they are imported."""


def known_as(function: Any, target: str) -> Workaround | None:
    """The workaround that `function` is, as an override of the method at this dotted path."""
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None)
    return next(
        (
            known
            for known in KNOWN
            if module in known.modules and name == known.function and target == known.target
        ),
        None,
    )

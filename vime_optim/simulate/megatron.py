"""megatron-core on the simulated device, with torch's Adam or a stand-in for a FusedAdam."""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
import types
import warnings
from collections.abc import Mapping
from typing import Literal

from vime_optim.errors import SettingsError
from vime_optim.simulate import device
from vime_optim.simulate.backward import wrap_megatron_hooks
from vime_optim.simulate.bootstrap import bootstrap_env
from vime_optim.simulate.triton_stub import provide_triton

# What Transformer Engine's `pytorch.optimizers` offers that megatron's optimizer code imports late.
# This leaf alone answers: without its parents, `import transformer_engine` fails as it should.
_TE_MODULE = "transformer_engine.pytorch.optimizers"
SIMULATED_TE_VERSION = "2.20.2"
_shown: dict[str, types.ModuleType] = {}


def prepare(optimizer: Literal["torch", "te"]) -> None:
    """Imports megatron-core without Transformer Engine and settles which Adam its optimizers use.

    Switches the simulated device on, in processes started from here on too. May be called again
    with the other choice. megatron-core must be importable.

    Args:
        optimizer: "torch" for torch.optim's Adam, "te" for the stand-in of Transformer Engine's
            FusedAdam.

    Raises:
        SettingsError: another value of `optimizer`.
    """
    if optimizer not in ("torch", "te"):
        raise SettingsError(
            "unknown optimizer to simulate", got=optimizer, expected="'torch' or 'te'"
        )
    device.enable()
    os.environ.update(bootstrap_env(os.environ))
    provide_triton()
    core = _import_megatron()
    distributed = importlib.import_module("megatron.core.distributed")
    wrap_megatron_hooks(distributed.DistributedDataParallel)
    complete_router()
    if optimizer == "torch":
        _use_torch(core)
        return
    from vime_optim.simulate.fused_adam import FusedAdam

    use_fused_adam(FusedAdam, "TE", SIMULATED_TE_VERSION, {_TE_MODULE: {}})


def _import_megatron() -> dict[str, types.ModuleType]:
    """The modules of megatron.core.optimizer that hold names to set."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("megatron.core")
        return {
            name: importlib.import_module(f"megatron.core.optimizer{suffix}")
            for name, suffix in (
                ("optimizer", ""),
                ("distrib", ".distrib_optimizer"),
                ("config", ".optimizer_config"),
            )
        }


def complete_router() -> None:
    """In 0.16 and 0.17 the MoE router reads a name that only Transformer Engine brings."""
    utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(utils, "te_general_gemm"):
        utils.te_general_gemm = None  # type: ignore[attr-defined]


def _use_torch(core: dict[str, types.ModuleType]) -> None:
    import torch

    hide_modules()
    _set_adam(core, torch.optim.AdamW, None)
    _set_te_version(core, None)


def use_fused_adam(
    adam: type,
    owner: Literal["TE", "APEX"],
    te_version: str | None,
    modules: Mapping[str, Mapping[str, object]],
) -> None:
    """Have Megatron's optimizers use this FusedAdam; for `modules` see `show_modules`."""
    core = _import_megatron()
    hide_modules()
    _set_adam(core, adam, owner)
    _set_te_version(core, te_version)
    show_modules(adam, modules)


def show_modules(adam: type, modules: Mapping[str, Mapping[str, object]]) -> None:
    """Have `import` find modules with FusedAdam, and with these names, in each."""
    for name, members in modules.items():
        module = _shown[name] = types.ModuleType(name)
        vars(module).update({"FusedAdam": adam, **members})
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    sys.modules.update(_shown)


def hide_modules() -> None:
    """Take back what `use_fused_adam` showed; a package that is installed stays."""
    for name, module in _shown.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
    _shown.clear()


def _set_adam(
    core: dict[str, types.ModuleType], adam: type, owner: Literal["TE", "APEX"] | None
) -> None:
    """The names that Megatron's optimizer modules settle when they are imported."""
    core["optimizer"].Adam = adam  # type: ignore[attr-defined]
    core["optimizer"].USING_PYTORCH_OPTIMIZER = owner is None  # type: ignore[attr-defined]
    distrib = core["distrib"]
    # 0.15 to 0.19 import this one as the class whose isinstance check guards the wrapper.
    distrib.Adam = adam  # type: ignore[attr-defined]
    distrib.HAVE_APEX_OR_TE = owner is not None  # type: ignore[attr-defined]
    distrib.USING_TE_OPTIMIZER = owner == "TE"  # type: ignore[attr-defined]
    distrib.USING_APEX_OPTIMIZER = owner == "APEX"  # type: ignore[attr-defined]


def _set_te_version(core: dict[str, types.ModuleType], version: str | None) -> None:
    """What the optimizer modules hear of Transformer Engine; the rest of megatron finds none."""
    from packaging.version import Version

    def is_te_min_version(minimum: str, check_equality: bool = True) -> bool:
        if version is None:
            return False
        found, asked = Version(version), Version(minimum)
        return found >= asked if check_equality else found > asked

    for module in core.values():
        if hasattr(module, "is_te_min_version"):
            module.is_te_min_version = is_te_min_version  # type: ignore[attr-defined]

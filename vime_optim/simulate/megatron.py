"""megatron-core on the simulated device, with torch's Adam or the FusedAdam stand-in."""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
import types
import warnings
from typing import Literal

from vime_optim.errors import SettingsError
from vime_optim.simulate import device
from vime_optim.simulate.backward import wrap_megatron_hooks
from vime_optim.simulate.bootstrap import bootstrap_env
from vime_optim.simulate.triton_stub import provide_triton

# What Transformer Engine's `pytorch.optimizers` offers that megatron's optimizer code imports late.
_TE_MODULE = "transformer_engine.pytorch.optimizers"
SIMULATED_TE_VERSION = "2.20.2"


def prepare(optimizer: Literal["torch", "te"]) -> None:
    """Imports megatron-core without Transformer Engine and settles which Adam its optimizers use.

    Switches the simulated device on, in processes started from here on too. May be called again
    with the other choice. megatron-core must be importable.

    Args:
        optimizer: "torch" for torch.optim's Adam, "te" for the FusedAdam stand-in.

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
    _complete_router()
    if optimizer == "te":
        _use_stand_in(core)
    else:
        _use_torch(core)


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


def _complete_router() -> None:
    """Before 0.17 the MoE router reads a name that is only imported with Transformer Engine."""
    utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(utils, "te_general_gemm"):
        utils.te_general_gemm = None  # type: ignore[attr-defined]


def _use_torch(core: dict[str, types.ModuleType]) -> None:
    import torch

    core["optimizer"].Adam = torch.optim.AdamW  # type: ignore[attr-defined]
    core["optimizer"].USING_PYTORCH_OPTIMIZER = True  # type: ignore[attr-defined]
    distrib = core["distrib"]
    # 0.15 to 0.19 import this one as the class whose isinstance check guards the wrapper.
    distrib.Adam = torch.optim.AdamW  # type: ignore[attr-defined]
    distrib.HAVE_APEX_OR_TE = False  # type: ignore[attr-defined]
    distrib.USING_TE_OPTIMIZER = False  # type: ignore[attr-defined]
    distrib.USING_APEX_OPTIMIZER = False  # type: ignore[attr-defined]
    _set_te_version(core, None)
    _hide_optimizers_module()


def _use_stand_in(core: dict[str, types.ModuleType]) -> None:
    from vime_optim.simulate.fused_adam import FusedAdam

    core["optimizer"].Adam = FusedAdam  # type: ignore[attr-defined]
    core["optimizer"].USING_PYTORCH_OPTIMIZER = False  # type: ignore[attr-defined]
    distrib = core["distrib"]
    distrib.Adam = FusedAdam  # type: ignore[attr-defined]
    distrib.HAVE_APEX_OR_TE = True  # type: ignore[attr-defined]
    distrib.USING_TE_OPTIMIZER = True  # type: ignore[attr-defined]
    distrib.USING_APEX_OPTIMIZER = False  # type: ignore[attr-defined]
    _set_te_version(core, SIMULATED_TE_VERSION)
    _show_optimizers_module(FusedAdam)


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


def _show_optimizers_module(adam: type) -> None:
    # OptimizerConfig imports FusedAdam when it is built. The leaf alone answers that import:
    # without its parents, `import transformer_engine` goes on to fail as it should.
    module = types.ModuleType(_TE_MODULE)
    module.FusedAdam = adam  # type: ignore[attr-defined]
    module.__spec__ = importlib.machinery.ModuleSpec(_TE_MODULE, None)
    sys.modules[_TE_MODULE] = module


def _hide_optimizers_module() -> None:
    shown = sys.modules.get(_TE_MODULE)
    if shown is not None and "transformer_engine" not in sys.modules:
        del sys.modules[_TE_MODULE]

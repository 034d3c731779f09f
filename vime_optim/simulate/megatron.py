"""megatron-core on the simulated device, with torch's Adam or a stand-in for a FusedAdam."""

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
# Where pickle looks for the class of Apex, which stock puts into checkpoints (F9).
_APEX_MODULES = ("apex", "apex.optimizers", "apex.optimizers.fused_adam")
_SHOWN = "__shown_by_vime_optim__"
SIMULATED_TE_VERSION = "2.20.2"


def prepare(optimizer: Literal["torch", "te", "apex"]) -> None:
    """Imports megatron-core without Transformer Engine and settles which Adam its optimizers use.

    Switches the simulated device on, in processes started from here on too. May be called again
    with the other choice. megatron-core must be importable.

    Args:
        optimizer: "torch" for torch.optim's Adam, "te" and "apex" for the stand-ins of Transformer
            Engine's and NVIDIA Apex's FusedAdam.

    Raises:
        SettingsError: another value of `optimizer`.
    """
    if optimizer not in ("torch", "te", "apex"):
        raise SettingsError(
            "unknown optimizer to simulate", got=optimizer, expected="'torch', 'te' or 'apex'"
        )
    device.enable()
    os.environ.update(bootstrap_env(os.environ))
    provide_triton()
    core = _import_megatron()
    distributed = importlib.import_module("megatron.core.distributed")
    wrap_megatron_hooks(distributed.DistributedDataParallel)
    _complete_router()
    if optimizer == "te":
        _use_transformer_engine(core)
    elif optimizer == "apex":
        _use_apex(core)
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

    _hide_optimizers_modules()
    _set_adam(core, torch.optim.AdamW, None)
    _set_te_version(core, None)


def _use_transformer_engine(core: dict[str, types.ModuleType]) -> None:
    from vime_optim.simulate.fused_adam import FusedAdam

    _hide_optimizers_modules()
    _set_adam(core, FusedAdam, "TE")
    _set_te_version(core, SIMULATED_TE_VERSION)
    _show_te_module(FusedAdam)


def _use_apex(core: dict[str, types.ModuleType]) -> None:
    from vime_optim.simulate.apex_adam import FusedAdam

    # What builds models asks for `apex` on import and would take norms from it, which it has not.
    importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    _hide_optimizers_modules()
    _set_adam(core, FusedAdam, "APEX")
    _set_te_version(core, None)
    _show_apex_modules(FusedAdam)


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


def _show_te_module(adam: type) -> None:
    # OptimizerConfig imports FusedAdam when it is built. The leaf alone answers that import:
    # without its parents, `import transformer_engine` goes on to fail as it should.
    _show(_TE_MODULE, FusedAdam=adam)


def _show_apex_modules(adam: type) -> None:
    # With parents, without which pickle finds no class. What Megatron imports late of Apex beside
    # its optimizers is in none of them, and is looked for in vain as before.
    for name in _APEX_MODULES[1:]:
        _show(name, FusedAdam=adam)
    _show(_APEX_MODULES[0], optimizers=sys.modules[_APEX_MODULES[1]])


def _show(name: str, **members: object) -> None:
    module = types.ModuleType(name)
    vars(module).update(members)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module)[_SHOWN] = True
    sys.modules[name] = module


def _hide_optimizers_modules() -> None:
    """Take back what was shown; a package that is installed stays."""
    for name in (_TE_MODULE, *_APEX_MODULES):
        if hasattr(sys.modules.get(name), _SHOWN):
            del sys.modules[name]

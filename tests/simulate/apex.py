"""megatron-core on the simulated device with the stand-in for Apex's FusedAdam."""

from __future__ import annotations

import importlib
import types

from tests.simulate.apex_adam import MODULE, FusedAdam
from vime_optim.simulate import megatron

#: Where pickle looks for the class of Apex, which stock puts into checkpoints (F9): with parents,
#: without which it finds none. What Megatron imports late of Apex beside its optimizers is in none
#: of them, and is looked for in vain as before.
MODULES = {
    MODULE: {},
    "apex.optimizers": {},
    "apex": {"optimizers": types.SimpleNamespace(FusedAdam=FusedAdam)},
}


def prepare() -> None:
    """As `vime_optim.simulate.megatron.prepare`."""
    megatron.prepare("torch")
    # What builds models asks for `apex` on import and would take norms from it, which it has not.
    importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    megatron.use_fused_adam(FusedAdam, "APEX", None, MODULES)

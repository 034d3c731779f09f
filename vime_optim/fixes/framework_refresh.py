"""What frameworks call after a load keeps masters that were restored.

Symptom: masters that a load restored are rounded to the parameters (F12).
Cause: Megatron-Bridge and NeMo-RL refresh all float32 copies themselves, some of them after each
load.
Changes: what they call does what the fix fine-tune makes of Megatron's method.
Leaves alone: optimizers without CPU offload.
Remove when: the frameworks refresh after loads of the model alone.
"""

from __future__ import annotations

from typing import Any

from vime_optim.optimizer.kinds import is_hybrid
from vime_optim.registry import Fix, Hit, takes

_IN_MEGATRON_BRIDGE = (
    "megatron.bridge.training.optim",
    "sync_hybrid_device_optimizer_fp32_master_copies",
)
_IN_NEMO_RL = ("nemo_rl.models.megatron.setup", "_force_sync_optimizer_fp32_from_model")

FIX = Fix(
    id="framework-refresh",
    faults=("F12",),
    summary="what frameworks call after a load keeps masters that were restored",
    requires=("fine-tune", "hybrid-refresh"),
)


@FIX.wraps(*_IN_MEGATRON_BRIDGE, takes("optimizer"), optional=True)
@FIX.wraps(*_IN_NEMO_RL, takes("optimizer", "model"), optional=True)
def _refresh_masters(original: Any, hit: Hit, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaced: it copies the parameters over every master of CPU offload, restored ones too."""
    members = getattr(optimizer, "chained_optimizers", [optimizer])
    hybrids = [m for m in members if is_hybrid(getattr(m, "optimizer", None))]
    if not hybrids:
        return original(optimizer, *args, **kwargs)
    hit()
    for member in hybrids:
        member._copy_model_params_to_main_params()
    return True

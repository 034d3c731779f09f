"""Modules that several fixes wrap something of, and the wrappers that they share."""

from __future__ import annotations

OPTIMIZER = "megatron.core.optimizer.optimizer"
DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer"
HYBRID = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer"
DIST_CHECKPOINTING = "megatron.core.dist_checkpointing"
SERIALIZATION = f"{DIST_CHECKPOINTING}.serialization"
STRATEGIES = f"{DIST_CHECKPOINTING}.strategies"
TORCH_STRATEGY = f"{STRATEGIES}.torch"
TRAINING = "megatron.training.checkpointing"
NVRX = "nvidia_resiliency_ext.checkpointing.async_ckpt"
DCP = "torch.distributed.checkpoint"

# In whose calls several fixes have a step (see Target.wrap).
SAVE = "vime_optim.fixes.save_load:tell_save"
LOAD = "vime_optim.fixes.save_load:tell_load"
STATE_DICT = "vime_optim.fixes.save_load:tell_state_dict"

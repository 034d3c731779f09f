"""Modules of Megatron, torch and nvidia-resiliency-ext that several fixes wrap something of."""

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

"""Modules and classes that several fixes wrap something of, and the wrappers that they share."""

from __future__ import annotations

from vime_optim.registry import Target, takes

OPTIMIZER = "megatron.core.optimizer.optimizer"
DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer"
HYBRID = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer"
DIST_CHECKPOINTING = "megatron.core.dist_checkpointing"
SERIALIZATION = f"{DIST_CHECKPOINTING}.serialization"
STRATEGIES = f"{DIST_CHECKPOINTING}.strategies"
TORCH_STRATEGY = f"{STRATEGIES}.torch"
VALIDATION = f"{DIST_CHECKPOINTING}.validation"
TRAINING = "megatron.training.checkpointing"
NVRX = "nvidia_resiliency_ext.checkpointing.async_ckpt"
DCP = "torch.distributed.checkpoint"

CHAINED_OPTIMIZER = f"{OPTIMIZER}:ChainedOptimizer"
DISTRIBUTED_OPTIMIZER = f"{DISTRIBUTED}:DistributedOptimizer"
HYBRID_OPTIMIZER = f"{HYBRID}:HybridDeviceOptimizer"
MIXED_PRECISION_OPTIMIZER = f"{OPTIMIZER}:MixedPrecisionOptimizer"
FLOAT16_OPTIMIZER = f"{OPTIMIZER}:Float16OptimizerWithFloat16Params"
FP32_OPTIMIZER = f"{OPTIMIZER}:FP32Optimizer"
LOAD_PLANNER = f"{TORCH_STRATEGY}:MCoreLoadPlanner"

# In whose calls several fixes have a step (see Target.wrap).
SAVE = "vime_optim.fixes.save_load:tell_save"
LOAD = "vime_optim.fixes.save_load:tell_load"
STATE_DICT = "vime_optim.fixes.save_load:tell_state_dict"


def in_save(*names: str) -> Target:
    """A step in dist_checkpointing.save that needs these arguments."""
    return Target(SERIALIZATION, "save", SAVE, takes(*names))


def in_load(*names: str) -> Target:
    """A step in dist_checkpointing.load that needs these arguments."""
    return Target(SERIALIZATION, "load", LOAD, takes(*names))


def in_state_dict() -> Target:
    """A step in DistributedOptimizer.state_dict."""
    return Target(DISTRIBUTED, "DistributedOptimizer.state_dict", STATE_DICT, takes("self"))

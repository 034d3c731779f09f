"""Modules and classes that several fixes wrap something of, and the wrappers that they share."""

from __future__ import annotations

from vime_optim.registry import Diagnose, Target, takes

DIST_CHECKPOINTING = "megatron.core.dist_checkpointing"
SERIALIZATION = f"{DIST_CHECKPOINTING}.serialization"
STRATEGIES = f"{DIST_CHECKPOINTING}.strategies"
TORCH_STRATEGY = f"{STRATEGIES}.torch"
VALIDATION = f"{DIST_CHECKPOINTING}.validation"
TRAINING = "megatron.training.checkpointing"
NVRX = "nvidia_resiliency_ext.checkpointing.async_ckpt"
DCP = "torch.distributed.checkpoint"

_OPTIMIZER = "megatron.core.optimizer"
MEGATRON_OPTIMIZER = f"{_OPTIMIZER}.optimizer:MegatronOptimizer"
MIXED_PRECISION_OPTIMIZER = f"{_OPTIMIZER}.optimizer:MixedPrecisionOptimizer"
FLOAT16_OPTIMIZER = f"{_OPTIMIZER}.optimizer:Float16OptimizerWithFloat16Params"
FP32_OPTIMIZER = f"{_OPTIMIZER}.optimizer:FP32Optimizer"
CHAINED_OPTIMIZER = f"{_OPTIMIZER}.optimizer:ChainedOptimizer"
DISTRIBUTED_OPTIMIZER = f"{_OPTIMIZER}.distrib_optimizer:DistributedOptimizer"
HYBRID_OPTIMIZER = f"{_OPTIMIZER}.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer"
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


_IS_METHOD = takes("self")


def in_state_dict(diagnose: Diagnose = _IS_METHOD) -> Target:
    """A step in DistributedOptimizer.state_dict."""
    module, _, owner = DISTRIBUTED_OPTIMIZER.partition(":")
    return Target(module, f"{owner}.state_dict", STATE_DICT, diagnose)

"""Stands in for the module of Megatron-Bridge: the one function, and what it does to masters.

Copies the parameters over every float32 copy that CPU offload keeps, whatever was loaded.
"""

from __future__ import annotations

from typing import Any


def sync_hybrid_device_optimizer_fp32_master_copies(optimizer: Any) -> bool:
    for member in getattr(optimizer, "chained_optimizers", [optimizer]):
        pairs = zip(member.model_float16_groups, member.shard_fp32_from_float16_groups, strict=True)
        for params, shards in pairs:
            for param, shard in zip(params, shards, strict=True):
                if shard is not None:
                    place = member._get_model_param_range_map(param)["param"]
                    shard.data.copy_(param.view(-1)[place.start : place.end])
        for param, clone in member.optimizer.gpu_params_map_cpu_copy.items():
            clone.data.copy_(param.data)
        member.optimizer.update_fp32_param_by_new_param()
    return True

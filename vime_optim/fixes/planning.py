"""Plans of thousands of chunks are checked and made in seconds, not hours.

Symptom: saves of large MoE models stand still while rank 0 validates the plan (F30); loads try
every chunk against every other; frameworks switch the check off altogether.
Cause: torch compares chunks pair by pair, or sweeps along one axis that all of them span.
Changes: torch's check is answered in n log n (planning/global_check), with ranks in its messages,
also where a framework replaced it by one that says yes; so are read items and checks of shards.
Of a key with prepended axes a rank describes its own shards to torch, not the grid of all ranks.
Leaves alone: plans of few chunks, and whatever is not understood: torch's own code judges it.
Remove when: torch's checks are near linear for keys whose chunks all span the longest axis.
"""

from __future__ import annotations

import dataclasses
import threading
from types import ModuleType
from typing import Any

from vime_optim.errors import PlanError
from vime_optim.fixes.places import DCP, NVRX, STRATEGIES, TORCH_STRATEGY, VALIDATION
from vime_optim.log import logger
from vime_optim.probe import (
    missing_parameters,
    missing_words,
    parameters_of,
    source_of,
)
from vime_optim.registry import NEEDED, Diagnosis, Fix, Hit, left_to_others, not_understood, takes

_checked = threading.local()

_FEW_SHARDS = 64
_PLANS = ("state_dict", "storage_writer", "process_group")
_READS = ("fqn", "checkpoint_md", "local_chunks")


FIX = Fix(
    id="planning",
    faults=("F30",),
    summary="plans of many chunks are sent, made and checked in n log n",
)


def _returns_errors(check: Any) -> bool:
    """Whether torch's check returns a list of messages (from 2.13 on), not whether all is well."""
    return "return errors" in source_of(check)


def _diagnose_check(module: ModuleType, original: Any) -> Diagnosis:
    reason = missing_parameters(original, "global_plan", "metadata")
    if not reason and not _returns_errors(original):
        reason = missing_words(original, "return all_good")
    return not_understood(reason) if reason else NEEDED


@FIX.wraps(f"{DCP}.default_planner", "_validate_global_plan", left_to_others(_diagnose_check))
def _validate_global_plan(original: Any, hit: Hit, global_plan: Any, metadata: Any) -> Any:
    from vime_optim.planning import global_check

    hit()
    verdict = global_check.check(global_plan, metadata.state_dict_metadata)
    for fault in verdict.faults:
        logger.warning(fault)
    _checked.metadata = metadata
    returns_errors = _returns_errors(original)
    if not verdict.unproved:
        return list(verdict.faults) if returns_errors else not verdict.faults
    rest = {key: metadata.state_dict_metadata[key] for key in verdict.unproved}
    answer = original(global_plan, dataclasses.replace(metadata, state_dict_metadata=rest))
    return verdict.faults + answer if returns_errors else answer and not verdict.faults


@FIX.wraps(f"{TORCH_STRATEGY}:MCoreSavePlanner", "create_global_plan", takes("all_plans"))
def _create_global_plan(original: Any, hit: Hit, self: Any, all_plans: Any) -> Any:
    from vime_optim.planning import exchange, global_check

    whole = exchange.whole_of(self, all_plans)
    if whole is not None:
        hit()
        _refuse(whole.verdict.faults)
        self.global_plan, self.metadata = whole.plans, whole.metadata()
        return self.global_plan, self.metadata
    _checked.metadata = None
    plans, metadata = original(self, all_plans)
    if _checked.metadata is None:
        # Somebody switched torch's check off, for its time: ours takes none worth the name.
        hit()
        _refuse(global_check.check(plans, metadata.state_dict_metadata).faults)
    _checked.metadata = None
    return plans, metadata


def _refuse(faults: list[str]) -> None:
    if faults:
        raise PlanError(
            "the plan of this save is wrong",
            where=faults[0],
            got="; ".join(faults[1:4]) or None,
            expected="chunks that fill each tensor, every element once",
            next_step="Nothing was written. Do all ranks run the same model and layout?",
        )


@FIX.wraps(f"{DCP}.utils:_DistWrapper", "gather_object", takes("self", "object"))
def _gather_object(original: Any, hit: Hit, self: Any, object: Any) -> Any:
    from torch.distributed.checkpoint.planner import SavePlan

    from vime_optim.planning import exchange

    if not isinstance(object, SavePlan):
        return original(self, object)
    hit()
    return exchange.gather_plans(original, self, object)


@FIX.wraps(f"{STRATEGIES}.state_dict_saver", "save_state_dict_async_plan", takes(*_PLANS))
@FIX.wraps(f"{NVRX}.state_dict_saver", "save_state_dict_async_plan", takes(*_PLANS), optional=True)
def _plan_save(original: Any, hit: Hit, *args: Any, **kwargs: Any) -> Any:
    from vime_optim.planning import exchange

    hit()
    return exchange.plan_together(original, *args, **kwargs)


@FIX.wraps(f"{DCP}.planner_helpers", "create_read_items_for_chunk_list", takes(*_READS))
def _read_items(
    original: Any, hit: Hit, fqn: str, checkpoint_md: Any, local_chunks: list[Any]
) -> list[Any]:
    from vime_optim.planning import reads

    hit()
    return reads.create_read_items(original, fqn, checkpoint_md, local_chunks)


@FIX.wraps(
    "torch.distributed._shard.sharding_spec._internals",
    "validate_non_overlapping_shards_metadata",
    left_to_others(takes("shards")),
    optional=True,
)
def _validate_shards(original: Any, hit: Hit, shards: list[Any]) -> None:
    from vime_optim.files import cover

    if len(shards) > _FEW_SHARDS and cover.are_disjoint(
        [shard.shard_offsets for shard in shards], [shard.shard_sizes for shard in shards]
    ):
        hit()
        return
    original(shards)


def _diagnose_global_shards(module: ModuleType, original: Any) -> Diagnosis:
    reason = missing_words(original, "without_data()", "all_gather_object", "nested_values")
    if reason:
        return not_understood(reason)
    known = {"sharded_state_dict", "process_group"}
    more = set(parameters_of(original)) - known
    return not_understood(f"parameters {sorted(more)} are not known") if more else NEEDED


@FIX.wraps(VALIDATION, "determine_global_metadata", _diagnose_global_shards)
def _global_metadata(
    original: Any, hit: Hit, sharded_state_dict: Any, process_group: Any = None
) -> tuple[list[Any], Any]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedBase

    from vime_optim.planning import shards

    found = list(nested_values(sharded_state_dict))
    if not all(isinstance(shard, ShardedBase) for shard in found):
        group = {} if process_group is None else {"process_group": process_group}
        return original(sharded_state_dict, **group)  # type: ignore[no-any-return]
    hit()
    local = [shard.without_data() for shard in found]
    return local, shards.gather(local, process_group)


def _diagnose_torch_tensor(module: ModuleType, original: Any) -> Diagnosis:
    reason = missing_words(original, "axis_fragmentations", "prepend_axis_num", "product(")
    reason = reason or missing_words(
        module._unwrap_pyt_sharded_tensor, "LocalShardsContainer", "_sh_ten.data"
    )
    return not_understood(reason) if reason else NEEDED


@FIX.wraps(TORCH_STRATEGY, "sharded_tensor_to_torch_sharded_tensor", _diagnose_torch_tensor)
def _torch_tensor(original: Any, hit: Hit, sh_tens: Any, *args: Any, **kwargs: Any) -> Any:
    from vime_optim.planning import local_shards

    made = local_shards.container_of(sh_tens)
    if made is None:
        return original(sh_tens, *args, **kwargs)
    hit()
    return made


@FIX.wraps(VALIDATION, "validate_sharding_integrity", takes("global_metadata"))
def _validate_integrity(
    original: Any, hit: Hit, global_metadata: Any, *args: Any, **kwargs: Any
) -> None:
    from vime_optim.planning import shards

    if isinstance(global_metadata, shards.GlobalShards):
        hit()
        shards.validate(original, global_metadata, *args, **kwargs)
    else:
        original(global_metadata, *args, **kwargs)

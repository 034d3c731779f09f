"""Plans of thousands of chunks are checked and made in seconds, not hours.

Symptom: saves of large MoE models stand still for minutes to hours while rank 0 validates the
plan (F30); loads try every chunk against every other; frameworks switch the check off altogether.
Cause: torch compares chunks pair by pair (up to 2.9), or sweeps along one axis that every chunk of
a stacked key spans, which is pair by pair again.
Changes: torch's check of a global plan is answered in n log n, with the same verdicts, and messages
that name ranks; it runs also where a framework replaced torch's by one that says yes. Read items
are found by planes, in the order of older torch. Checks of shards' metadata likewise. Of a key with
prepended axes a rank describes its own shards to torch, not the grid of all ranks.
Leaves alone: plans of few chunks, and whatever is not understood: torch's own code judges it.
Remove when: torch's checks are near linear for keys whose chunks all span the longest axis.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from types import ModuleType
from typing import Any

from vime_optim.errors import PlanError
from vime_optim.fixes.places import NVRX, STRATEGIES
from vime_optim.probe import (
    describe_foreign_layer,
    missing_parameters,
    missing_words,
    parameters_of,
    source_of,
)
from vime_optim.registry import (
    NEEDED,
    Diagnosis,
    Fix,
    Hit,
    Target,
    fixed_upstream,
    not_understood,
    takes,
)

logger = logging.getLogger("vime_optim")
_checked = threading.local()

_FEW_SHARDS = 64


def _wrap_validate(original: Any, hit: Hit) -> Any:
    returns_errors = _returns_errors(original)

    def _validate_global_plan(global_plan: Any, metadata: Any) -> Any:
        from vime_optim.planning import global_check

        hit()
        verdict = global_check.check(global_plan, metadata.state_dict_metadata)
        for fault in verdict.faults:
            logger.warning(fault)
        _checked.metadata = metadata
        if not verdict.unproved:
            return list(verdict.faults) if returns_errors else not verdict.faults
        rest = {key: metadata.state_dict_metadata[key] for key in verdict.unproved}
        answer = original(global_plan, dataclasses.replace(metadata, state_dict_metadata=rest))
        return verdict.faults + answer if returns_errors else answer and not verdict.faults

    return _validate_global_plan


def _returns_errors(function: Any) -> bool:
    """Whether torch's check returns a list of messages (from 2.13 on), not whether all is well."""
    return "return errors" in source_of(function)


def _replaced_by(original: Any, module: ModuleType) -> str | None:
    """Whose code stands in torch's place, None for torch's own and for ours."""
    if getattr(original, "__vime_optim__", False):
        return None
    return describe_foreign_layer(original, module)


def _diagnose_validate(module: ModuleType, original: Any) -> Diagnosis:
    foreign = _replaced_by(original, module)
    if foreign is not None:
        return fixed_upstream(f"replaced by {foreign}; ours runs when the global plan is made")
    reason = missing_parameters(original, "global_plan", "metadata")
    if reason:
        return not_understood(reason)
    source = source_of(original)
    if "return errors" not in source and "return all_good" not in source:
        return not_understood("returns neither `errors` nor `all_good`")
    return NEEDED


def _wrap_global_plan(original: Any, hit: Hit) -> Any:
    def create_global_plan(self: Any, all_plans: Any) -> Any:
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

    return create_global_plan


def _refuse(faults: list[str]) -> None:
    if faults:
        raise PlanError(
            "the plan of this save is wrong",
            where=faults[0],
            got="; ".join(faults[1:4]) or None,
            expected="chunks that fill each tensor, every element once",
            next_step="Nothing was written. Do all ranks run the same model and layout?",
        )


def _wrap_gather(original: Any, hit: Hit) -> Any:
    def gather_object(self: Any, object: Any) -> Any:
        from torch.distributed.checkpoint.planner import SavePlan

        from vime_optim.planning import exchange

        if not isinstance(object, SavePlan):
            return original(self, object)
        hit()
        return exchange.gather_plans(original, self, object)

    return gather_object


def _wrap_plan_save(original: Any, hit: Hit) -> Any:
    def save_state_dict_async_plan(*args: Any, **kwargs: Any) -> Any:
        from vime_optim.planning import exchange

        hit()
        return exchange.plan_together(original, *args, **kwargs)

    return save_state_dict_async_plan


def _wrap_read_items(original: Any, hit: Hit) -> Any:
    def create_read_items_for_chunk_list(
        fqn: str, checkpoint_md: Any, local_chunks: list[Any]
    ) -> list[Any]:
        from vime_optim.planning import reads

        hit()
        return reads.create_read_items(original, fqn, checkpoint_md, local_chunks)

    return create_read_items_for_chunk_list


def _wrap_shards(original: Any, hit: Hit) -> Any:
    def validate_non_overlapping_shards_metadata(shards: list[Any]) -> None:
        from vime_optim.planning import overlap

        if len(shards) > _FEW_SHARDS and overlap.are_disjoint(
            [shard.shard_offsets for shard in shards], [shard.shard_sizes for shard in shards]
        ):
            hit()
            return
        original(shards)

    return validate_non_overlapping_shards_metadata


def _diagnose_shards(module: ModuleType, original: Any) -> Diagnosis:
    foreign = _replaced_by(original, module)
    if foreign is not None:
        return fixed_upstream(f"replaced by {foreign}")
    reason = missing_parameters(original, "shards")
    return not_understood(reason) if reason else NEEDED


def _wrap_global_shards(original: Any, hit: Hit) -> Any:
    def determine_global_metadata(
        sharded_state_dict: Any, process_group: Any = None
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

    return determine_global_metadata


def _diagnose_global_shards(module: ModuleType, original: Any) -> Diagnosis:
    reason = missing_words(original, "without_data()", "all_gather_object", "nested_values")
    if reason:
        return not_understood(reason)
    known = {"sharded_state_dict", "process_group"}
    more = set(parameters_of(original)) - known
    return not_understood(f"parameters {sorted(more)} are not known") if more else NEEDED


def _wrap_torch_tensor(original: Any, hit: Hit) -> Any:
    def sharded_tensor_to_torch_sharded_tensor(sh_tens: Any, *args: Any, **kwargs: Any) -> Any:
        from vime_optim.planning import local_shards

        made = local_shards.container_of(sh_tens)
        if made is None:
            return original(sh_tens, *args, **kwargs)
        hit()
        return made

    return sharded_tensor_to_torch_sharded_tensor


def _diagnose_torch_tensor(module: ModuleType, original: Any) -> Diagnosis:
    reason = missing_words(original, "axis_fragmentations", "prepend_axis_num", "product(")
    reason = reason or missing_words(
        module._unwrap_pyt_sharded_tensor, "LocalShardsContainer", "_sh_ten.data"
    )
    return not_understood(reason) if reason else NEEDED


def _wrap_integrity(original: Any, hit: Hit) -> Any:
    def validate_sharding_integrity(global_metadata: Any, *args: Any, **kwargs: Any) -> None:
        from vime_optim.planning import shards

        if isinstance(global_metadata, shards.GlobalShards):
            hit()
            shards.validate(original, global_metadata, *args, **kwargs)
        else:
            original(global_metadata, *args, **kwargs)

    return validate_sharding_integrity


_PLANNER = "torch.distributed.checkpoint.default_planner"
_HELPERS = "torch.distributed.checkpoint.planner_helpers"
_UTILS = "torch.distributed.checkpoint.utils"
_SHARDS = "torch.distributed._shard.sharding_spec._internals"
_VALIDATION = "megatron.core.dist_checkpointing.validation"


def _saver(module: str, optional: bool) -> Target:
    return Target(
        f"{module}.state_dict_saver",
        "save_state_dict_async_plan",
        _wrap_plan_save,
        takes("state_dict", "storage_writer", "process_group"),
        optional=optional,
    )


FIX = Fix(
    id="planning",
    faults=("F30",),
    summary="plans of many chunks are sent, made and checked in n log n",
    targets=(
        Target(_PLANNER, "_validate_global_plan", _wrap_validate, diagnose=_diagnose_validate),
        Target(
            _HELPERS,
            "create_read_items_for_chunk_list",
            _wrap_read_items,
            takes("fqn", "checkpoint_md", "local_chunks"),
        ),
        Target(
            _SHARDS,
            "validate_non_overlapping_shards_metadata",
            _wrap_shards,
            _diagnose_shards,
            optional=True,
        ),
        Target(_UTILS, "_DistWrapper.gather_object", _wrap_gather, takes("self", "object")),
        Target(
            f"{STRATEGIES}.torch",
            "MCoreSavePlanner.create_global_plan",
            _wrap_global_plan,
            takes("all_plans"),
        ),
        Target(
            f"{STRATEGIES}.torch",
            "sharded_tensor_to_torch_sharded_tensor",
            _wrap_torch_tensor,
            _diagnose_torch_tensor,
        ),
        Target(
            _VALIDATION,
            "determine_global_metadata",
            _wrap_global_shards,
            _diagnose_global_shards,
        ),
        Target(
            _VALIDATION,
            "validate_sharding_integrity",
            _wrap_integrity,
            takes("global_metadata"),
        ),
        _saver(STRATEGIES, optional=False),
        _saver(NVRX, optional=True),
    ),
)

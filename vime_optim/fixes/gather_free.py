"""fully_reshardable without gathering: the cost of dp_reshardable, files that Megatron loads.

Symptom: saving runs hosts out of memory, as every rank gathers float32 copies of everything (F11);
after load each moment holds the whole tensor that it was cut from (F10).
Cause: Megatron makes whole parameters, since its files used to be a regular grid.
Changes: both directions of the format are replaced by vime_optim/reshard; before anything is
written the data-parallel ranks compare a digest of the plan; on load, a tensor that the checkpoint
holds only in part raises, plain tensors are read straight into place, and states that FusedAdam
codes are read one shard at a time when the optimizer takes them.
Leaves alone: the format itself, Megatron's writers, and its reader where a file is not understood.
Remove when: Megatron writes irregular shards itself.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from vime_optim import collectives
from vime_optim.errors import CheckpointError
from vime_optim.fixes.places import (
    DISTRIBUTED,
    LOAD,
    SAVE,
    SERIALIZATION,
    STATE_DICT,
    TORCH_STRATEGY,
)
from vime_optim.fixes.sharding import ShardedOptimizerState
from vime_optim.optimizer.restoring import write_slot
from vime_optim.registry import Call, Fix, Hit, Target, takes
from vime_optim.reshard import coded
from vime_optim.reshard.engine import (
    ParamState,
    as_template,
    build_param_state,
    expect_load,
    param_states,
)
from vime_optim.reshard.keys import compare_digests
from vime_optim.reshard.taking import destinations_for, finish_load, give_back, lend
from vime_optim.state_dicts import replaced, walk


def _wrap_build(original: Any, hit: Hit) -> Any:
    def sharded_param_state_fully_reshardable(
        self: Any, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
    ) -> Any:
        hit()
        return build_param_state(self, model_sharded_state_dict, is_loading)

    return sharded_param_state_fully_reshardable


def _wrap_finish(original: Any, hit: Hit) -> Any:
    def load_parameter_state_from_fully_reshardable(self: Any, state_dict: Any) -> None:
        loaded = state_dict or {}
        destinations = destinations_for(self, loaded)
        if destinations is None:
            # Whole tensors that did not come through our template, from a local checkpoint say.
            original(self, state_dict)
            return
        hit()
        give_back(self)

        def write(slot: Any, value: torch.Tensor) -> None:
            write_slot(self, slot, value)

        finish_load(destinations, loaded, write)
        lend(self, loaded)

    return load_parameter_state_from_fully_reshardable


def _wrap_update(original: Any, hit: Hit) -> Any:
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        give_back(self)
        return original(self, *args, **kwargs)

    return update


def make_templates(call: Call) -> None:
    """Let the optimizers of a template be loaded into, also where it was built to be saved."""
    for state in param_states(call["sharded_state_dict"]):
        give_back(state.dist_opt)  # an earlier loaded state keeps its values
        if state.is_loading:
            expect_load(state)
    template = call["sharded_state_dict"]
    # What the fix `sharding` can rebuild, it rebuilds.
    for path, state in walk(template, leaves=(ParamState, ShardedOptimizerState)):
        if isinstance(state, ParamState) and not state.is_loading:
            template = replaced(template, path, as_template(state))
    call["sharded_state_dict"] = template


def compare_plans(call: Call) -> None:
    """Collective: raise on every rank when some are about to write different tensors."""
    for state in param_states(call["sharded_state_dict"]):
        _compare_plans(state)


def _compare_plans(state: ParamState) -> None:
    """Raise on every rank of the group when the ranks are about to write different tensors."""
    if torch.distributed.get_world_size(state.group) == 1:
        return
    digests = collectives.gathered(state.digest, state.group)
    if len(set(digests)) > 1:
        ranks = torch.distributed.get_process_group_ranks(state.group)
        compare_digests(digests, ranks, collectives.gathered(state.plan.keys, state.group))


def _wrap_local_plan(original: Any, hit: Hit) -> Any:
    def create_local_plan(self: Any) -> Any:
        plan = original(self)
        hit()
        _require_complete(self, plan)
        return plan

    return create_local_plan


def _require_complete(planner: Any, plan: Any) -> None:
    """Raise when the checkpoint's chunks do not cover what is about to be read."""
    read: dict[str, int] = {}
    for item in plan.items:
        key = item.dest_index.fqn
        read[key] = read.get(key, 0) + math.prod(item.lengths)
    may_differ = planner.allow_shape_mismatch_sharded_tensors or {}
    may_be_absent = bool(getattr(planner, "allow_partial_load", False))
    for key, value in planner.state_dict.items():
        wanted = _numel(value)
        if wanted is None or key in may_differ or read.get(key, 0) == wanted:
            continue
        if may_be_absent and key not in planner.metadata.state_dict_metadata:
            _leave_as_it_is(value)  # the planner's decision: there is nothing of that name
            continue
        raise CheckpointError(
            "the checkpoint holds a tensor only in part",
            where=key,
            got=f"{read.get(key, 0)} elements of this rank's share",
            expected=f"{wanted} elements",
            next_step="the checkpoint is incomplete: load another one; nothing was read",
        )


def _numel(value: Any) -> int | None:
    """Elements that a rank wants of one entry of a DCP state dict, or None for objects."""
    create = getattr(value, "__create_chunk_list__", None)
    if create is not None:
        return sum(int(math.prod(chunk.sizes)) for chunk in create())
    local_shards = getattr(value, "local_shards", None)  # torch's own ShardedTensor
    if callable(local_shards):
        return sum(int(shard.tensor.numel()) for shard in local_shards())
    return int(value.numel()) if type(value) is torch.Tensor else None


def _leave_as_it_is(value: Any) -> None:
    """Coded states are read when the optimizer takes them: there will be nothing to read."""
    for part in getattr(value, "_local_shards", [value]):
        sharded = getattr(part, "_sh_ten", None)
        shard = coded.shard_of(getattr(sharded, "data", getattr(part, "tensor", None)))
        if shard is not None:
            shard.may_be_absent = True


def _wrap_resolve(original: Any, hit: Hit) -> Any:
    def resolve_tensor(self: Any, read_item: Any) -> Any:
        return coded.with_memory(self, original(self, read_item))

    return resolve_tensor


def _wrap_parallel_load(original: Any, hit: Hit) -> Any:
    def apply_loading_parallelization(self: Any, sharded_state_dict: Any) -> Any:
        distribution = original(self, sharded_state_dict)
        if distribution is not None:
            coded.give_shared_shards_memory(sharded_state_dict, distribution)
        return distribution

    return apply_loading_parallelization


FIX = Fix(
    id="gather-free",
    faults=("F7", "F10", "F11"),
    summary="fully_reshardable is saved and loaded in place, without gathering",
    targets=(
        Target(
            DISTRIBUTED,
            "DistributedOptimizer.sharded_param_state_fully_reshardable",
            _wrap_build,
            takes("self", "model_sharded_state_dict", "is_loading", "metadata"),
        ),
        Target(
            DISTRIBUTED,
            "DistributedOptimizer.load_parameter_state_from_fully_reshardable",
            _wrap_finish,
            takes("self", "state_dict"),
        ),
        Target(DISTRIBUTED, "DistributedOptimizer.state_dict", STATE_DICT, takes("self")),
        Target(
            SERIALIZATION,
            "save",
            SAVE,
            takes("sharded_state_dict"),
        ),
        Target(
            SERIALIZATION,
            "load",
            LOAD,
            takes("sharded_state_dict"),
        ),
        *(
            Target(DISTRIBUTED, f"DistributedOptimizer.{name}", _wrap_update, optional=True)
            for name in ("step_with_ready_grads", "reload_model_params")
        ),
        Target(
            TORCH_STRATEGY,
            "MCoreLoadPlanner.create_local_plan",
            _wrap_local_plan,
            takes("self"),
        ),
        Target(
            TORCH_STRATEGY,
            "MCoreLoadPlanner.resolve_tensor",
            _wrap_resolve,
            takes("self", "read_item"),
        ),
        Target(
            "megatron.core.dist_checkpointing.strategies.fully_parallel",
            "FullyParallelLoadStrategyWrapper.apply_loading_parallelization",
            _wrap_parallel_load,
            takes("self", "sharded_state_dict"),
        ),
    ),
)

"""fully_reshardable without gathering: the cost of dp_reshardable, files that Megatron loads.

Symptom: a save runs hosts out of memory (F11); after a load each moment holds the whole tensor
that it was cut from (F10).
Cause: Megatron makes whole parameters, since its files used to be a regular grid.
Changes: both directions of the format are those of vime_optim/reshard; the data-parallel ranks
compare a digest of the plan before anything is written; a tensor that the checkpoint holds only in
part raises.
Leaves alone: the format itself, Megatron's writers, and its reader where a file is not understood.
Remove when: Megatron writes irregular shards itself.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from vime_optim import collectives
from vime_optim.errors import CheckpointError
from vime_optim.fixes.places import (
    DISTRIBUTED_OPTIMIZER,
    LOAD_PLANNER,
    STRATEGIES,
    in_load,
    in_save,
    in_state_dict,
)
from vime_optim.fixes.sharding import ShardedOptimizerState
from vime_optim.optimizer.restoring import write_slot
from vime_optim.registry import Call, Fix, Hit, takes
from vime_optim.state_dicts import replaced, walk

if TYPE_CHECKING:
    from vime_optim.reshard.engine import ParamState

_PARALLEL_LOAD = f"{STRATEGIES}.fully_parallel:FullyParallelLoadStrategyWrapper"
_GIVEN = ("model_sharded_state_dict", "is_loading", "metadata")

FIX = Fix(
    id="gather-free",
    faults=("F7", "F10", "F11"),
    summary="fully_reshardable is saved and loaded in place, without gathering",
    targets=(in_state_dict(), in_save("sharded_state_dict"), in_load("sharded_state_dict")),
)


@FIX.wraps(DISTRIBUTED_OPTIMIZER, "sharded_param_state_fully_reshardable", takes("self", *_GIVEN))
def _build(
    original: Any,
    hit: Hit,
    self: Any,
    model_sharded_state_dict: Any,
    is_loading: bool = False,
    metadata: Any = None,
) -> Any:
    from vime_optim.reshard.engine import build_param_state

    hit()
    return build_param_state(self, model_sharded_state_dict, is_loading)


@FIX.wraps(
    DISTRIBUTED_OPTIMIZER, "load_parameter_state_from_fully_reshardable", takes("state_dict")
)
def _finish(original: Any, hit: Hit, self: Any, state_dict: Any) -> None:
    from vime_optim.reshard import taking

    loaded = state_dict or {}
    destinations = taking.destinations_for(self, loaded)
    if destinations is None:
        # Whole tensors that did not come through our template, from a local checkpoint say.
        original(self, state_dict)
        return
    hit()
    taking.give_back(self)

    def write(slot: Any, value: torch.Tensor) -> None:
        write_slot(self, slot, value)

    taking.finish_load(destinations, loaded, write)
    taking.lend(self, loaded)


@FIX.wraps(DISTRIBUTED_OPTIMIZER, ("step_with_ready_grads", "reload_model_params"), optional=True)
def _update(original: Any, hit: Hit, self: Any, *args: Any, **kwargs: Any) -> Any:
    from vime_optim.reshard.taking import give_back

    give_back(self)
    return original(self, *args, **kwargs)


def make_templates(call: Call) -> None:
    """Let the optimizers of a template be loaded into, also where it was built to be saved."""
    from vime_optim.reshard.engine import ParamState, as_template, expect_load, param_states
    from vime_optim.reshard.taking import give_back

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
    from vime_optim.reshard.engine import param_states

    for state in param_states(call["sharded_state_dict"]):
        _compare_plans(state)


def _compare_plans(state: ParamState) -> None:
    """Raise on every rank of the group when the ranks are about to write different tensors."""
    from vime_optim.reshard.keys import differing_plans

    if torch.distributed.get_world_size(state.group) == 1:
        return
    digests = collectives.gathered(state.digest, state.group)
    if len(set(digests)) > 1:
        ranks = torch.distributed.get_process_group_ranks(state.group)
        raise differing_plans(digests, ranks, collectives.gathered(state.plan.keys, state.group))


@FIX.wraps(LOAD_PLANNER, "create_local_plan", takes("self"))
def _create_local_plan(original: Any, hit: Hit, self: Any) -> Any:
    plan = original(self)
    hit()
    _require_complete(self, plan)
    return plan


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
    from vime_optim.reshard import coded

    for part in getattr(value, "_local_shards", [value]):
        sharded = getattr(part, "_sh_ten", None)
        shard = coded.shard_of(getattr(sharded, "data", getattr(part, "tensor", None)))
        if shard is not None:
            shard.may_be_absent = True


@FIX.wraps(LOAD_PLANNER, "resolve_tensor", takes("self", "read_item"))
def _resolve_tensor(original: Any, hit: Hit, self: Any, read_item: Any) -> Any:
    from vime_optim.reshard import coded

    return coded.with_memory(self, original(self, read_item))


@FIX.wraps(_PARALLEL_LOAD, "apply_loading_parallelization", takes("self", "sharded_state_dict"))
def _parallel_load(original: Any, hit: Hit, self: Any, sharded_state_dict: Any) -> Any:
    from vime_optim.reshard import coded

    distribution = original(self, sharded_state_dict)
    if distribution is not None:
        coded.give_shared_shards_memory(sharded_state_dict, distribution)
    return distribution

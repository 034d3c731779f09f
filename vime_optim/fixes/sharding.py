"""fully_reshardable under PAO with CPU offload, a working default, and the recorded type on load.

Symptom: PAO with CPU offload does not resume from dp_reshardable (F1 to F3); without a sharding
type a save fails (F16).
Cause: the default is a format that Megatron itself dropped, and nothing tells the caller.
Changes: the type is settled once, where a sharded state dict is asked for; load() rebuilds the
state dict when the checkpoint records another type, and leaves the caller's description of the
model as it was; Megatron's training code builds its metadata with the type. A save that one rank
cannot build is refused by all of them in save(), not by this rank alone before it.
Leaves alone: Megatron-FSDP; local checkpoints (the fix `formats`); all other combinations.
Remove when: Megatron enforces or fixes the combination itself.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vime_optim import settings
from vime_optim.errors import CheckpointError, OptimizerStateError
from vime_optim.fixes.places import CHAINED_OPTIMIZER, DISTRIBUTED_OPTIMIZER, TRAINING, in_load
from vime_optim.log import logger
from vime_optim.optimizer.record import record_of
from vime_optim.probe import bind
from vime_optim.registry import Call, Fix, Hit, takes
from vime_optim.state_dicts import MadeDict, Path, copied, replaced, walk

TYPE_KEY = "distrib_optim_sharding_type"
RECORD_KEY = "param_state_sharding_type"
FULLY = "fully_reshardable"
DP = "dp_reshardable"
DEAD = "fully_sharded_model_space"
"""Megatron's default type; its flattened ranges were dropped before 0.15."""

_FROZEN_AT_START = 1000
"""More than Python 3.12 freezes by itself (375 objects); a user's gc.freeze() takes 100,000."""

_GIVEN = ("model_sharded_state_dict", "is_loading")

_warned = False


FIX = Fix(
    id="sharding",
    faults=("F16",),
    summary="fully_reshardable under PAO with CPU offload; the checkpoint's type on load",
    targets=(in_load("sharded_state_dict", "checkpoint_dir"),),
    after=("chained",),
)


class ShardedOptimizerState(MadeDict):
    """What sharded_state_dict() gave, able to be built anew, for another type or for loading.

    Attributes:
        owner: the optimizer that was asked, as Megatron's DistributedOptimizer.
        requested: the type that the caller asked for, None for Megatron's default.
        sharding_type: the type that was built.
        is_loading: whether it was built to be loaded into.
        rebuild: builds it with (sharding type, is_loading).
        refusal: why Megatron cannot build a template of this type for this model; matters if the
            checkpoint is of it.
    """

    owner: Any
    requested: str | None
    sharding_type: str
    is_loading: bool
    rebuild: Callable[[str, bool], dict[Any, Any]]
    refusal: BaseException | None = None


class RefusedState(dict[Any, Any]):
    """In place of a state dict to save that this rank could not build.

    save() raises on every rank for it; raised here, the others would wait in save() for ever. For
    all else it is as if the error had only now been raised.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def _raise(self, *args: Any, **kwargs: Any) -> Any:
        raise self.error

    __getitem__ = __setitem__ = __iter__ = __len__ = __contains__ = __reduce_ex__ = _raise
    __or__ = __ror__ = __eq__ = get = items = keys = values = copy = pop = update = _raise


class _Thread(threading.local):
    inside = False
    """Within the outermost sharded_state_dict()."""
    takes_any_type = True
    """False while what is built goes where fully_reshardable is not taken."""


_thread = _Thread()


@contextlib.contextmanager
def keeping_the_type() -> Iterator[None]:
    """In this block a save keeps the sharding type that it asks for."""
    before = _thread.takes_any_type
    _thread.takes_any_type = False
    try:
        yield
    finally:
        _thread.takes_any_type = before


def settle_type(config: Any, requested: str | None, is_loading: bool) -> str:
    """The sharding type to use instead of `requested`.

    Raises:
        OptimizerStateError: the policy is 'error' and a save asks for another type.
    """
    if not _thread.takes_any_type:
        return DP if requested in (None, DEAD) else str(requested)
    if requested is None or (requested == DEAD and not is_loading):
        return FULLY
    if is_loading or requested in (FULLY, "fsdp_dtensor") or not needs_fully(config):
        return requested
    policy = settings.current().sharding
    if policy == "off":
        return requested
    if policy == "error":
        raise OptimizerStateError(
            "the precision-aware optimizer with CPU offload must be saved as fully_reshardable",
            got=requested,
            expected=FULLY,
            next_step="pass distrib_optim_sharding_type='fully_reshardable'"
            " (--dist-ckpt-optim-fully-reshardable), or set VIME_OPTIM_SHARDING=enforce",
        )
    _warn_once(requested)
    return FULLY


def needs_fully(config: Any) -> bool:
    """True for PAO with CPU offload. `config` is an OptimizerConfig or Megatron's arguments."""
    return bool(
        getattr(config, "use_precision_aware_optimizer", False)
        and getattr(config, "optimizer_cpu_offload", False)
    )


def _warn_once(requested: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        logger.warning(
            "vime_optim: saving the optimizer as fully_reshardable, not %s: with the"
            " precision-aware optimizer and CPU offload only that resumes exactly"
            " (VIME_OPTIM_SHARDING=error|off changes this)",
            requested,
        )


@FIX.wraps(DISTRIBUTED_OPTIMIZER, "sharded_state_dict", takes(*_GIVEN, "metadata"))
@FIX.wraps(CHAINED_OPTIMIZER, "sharded_state_dict", takes(*_GIVEN))
def _sharded_state_dict(original: Any, hit: Hit, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Serves ChainedOptimizer and DistributedOptimizer; only the outermost call decides."""
    if _thread.inside:
        return original(self, *args, **kwargs)
    bound = bind(original, self, *args, **kwargs)
    is_loading = bool(bound.get("is_loading"))
    metadata = dict(bound.get("metadata") or {})
    requested = bound.pop("sharding_type", None) or metadata.get(TYPE_KEY)
    hit()

    def build(sharding_type: str, loads: bool) -> Any:
        bound.update(metadata={**metadata, TYPE_KEY: sharding_type}, is_loading=loads)
        _thread.inside = True
        try:
            with _collecting_new_garbage_only():
                made = original(**bound)
        finally:
            _thread.inside = False
        return described(made, sharding_type, loads)

    def described(made: Any, sharding_type: str, loads: bool) -> Any:
        if not isinstance(made, dict):
            return made
        state = ShardedOptimizerState(made)
        state.owner, state.requested, state.rebuild = self, requested, build
        state.sharding_type, state.is_loading = sharding_type, loads
        return state

    chosen = _settled(self, requested, is_loading)
    try:
        return build(chosen, is_loading)
    except (Exception, KeyboardInterrupt) as error:
        if not is_loading:
            if _is_alone():
                raise
            return RefusedState(error)
        # The checkpoint may well be of another type (a save was made fully_reshardable), and
        # then this one need not be possible: dp_reshardable refuses small buckets on some
        # ranks (F22).
        if chosen == FULLY or not isinstance(error, Exception):
            raise
        state = described({}, chosen, True)
        state.refusal = error
        return state


def _settled(optimizer: Any, requested: str | None, is_loading: bool) -> str:
    chosen = settle_type(getattr(optimizer, "config", None), requested, is_loading)
    if chosen == FULLY and not is_loading and record_of(optimizer).cannot_be_fully:
        return DP
    return chosen


def _is_alone() -> bool:
    distributed = torch.distributed
    return not distributed.is_initialized() or distributed.get_world_size() == 1


@contextlib.contextmanager
def _collecting_new_garbage_only() -> Iterator[None]:
    """Make Megatron's gc.collect() after a build look at what the build made, and nothing older.

    It walks every object of the process otherwise: 0.2 s, most of the time of a build (measured
    on H200). Where the user froze objects, nothing is changed, as they could not be told apart.
    """
    if gc.get_freeze_count() > _FROZEN_AT_START:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def recorded_types(state: Any) -> Iterator[str]:
    """Sharding types recorded in a state dict, in whatever place the caller put the optimizer."""
    from vime_optim.reshard.engine import ParamState

    for _, value in walk(state, leaves=ParamState):
        found = value.get(RECORD_KEY) if isinstance(value, dict) else None
        if isinstance(found, str):
            yield found


def take_the_saved_type(call: Call, hit: Hit) -> None:
    """Rebuild the template of an optimizer whose checkpoint is of another type than it is."""
    hit()
    template = call["sharded_state_dict"]
    found = list(optimizer_states(template))
    if found:
        saved = _type_of_checkpoint(str(call["checkpoint_dir"]))
        call["sharded_state_dict"] = fitting(template, found, saved)


@contextlib.contextmanager
def keeping_the_template(call: Call) -> Iterator[None]:
    """The caller's description of the model is afterwards as it was.

    Megatron's load exchanges factories for what they build, in place, and gives ShardedTensors
    other data. A caller that then asks the optimizer for a template with the same description
    (verl, with a folder for each) would be told that every parameter is missing.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    parameters = [
        (leaf, leaf.data)
        for _, leaf in walk(call["sharded_state_dict"])
        if isinstance(leaf, (ShardedTensor, ShardedTensorFactory))
        and isinstance(leaf.data, torch.nn.Parameter)
    ]
    call["sharded_state_dict"] = copied(call["sharded_state_dict"])
    try:
        yield
    finally:
        for leaf, data in parameters:
            leaf.data = data


def fitting(template: dict[Any, Any], found: list[FoundState], saved: str | None) -> dict[Any, Any]:
    """The template with the optimizer states of the type `saved`, built to be loaded into.

    Raises:
        Exception: of Megatron, when it cannot build the type for this model.
    """
    for path, state in found:
        wanted = saved or state.sharding_type
        if wanted != state.sharding_type:
            logger.warning(
                "vime_optim: the checkpoint is %s, not %s as asked; loading it as it is",
                saved,
                state.sharding_type,
            )
        elif state.refusal is not None:
            raise state.refusal
        if wanted != state.sharding_type or not state.is_loading:
            template = replaced(template, path, state.rebuild(wanted, True))
    return template


FoundState = tuple[Path, ShardedOptimizerState]
"""Where an optimizer's state is in a state dict, and the state."""


def optimizer_states(state: Any) -> Iterator[FoundState]:
    """Where a caller put what sharded_state_dict() gave it.

    Raises:
        BaseException: of the rank that could not build one.
    """
    for path, value in walk(state, leaves=(ShardedOptimizerState, RefusedState)):
        if isinstance(value, RefusedState):
            raise value.error
        if isinstance(value, ShardedOptimizerState):
            yield path, value


def _type_of_checkpoint(directory: str) -> str | None:
    """The sharding type that a checkpoint records, or None."""
    from megatron.core.dist_checkpointing import serialization

    common = serialization.load_common_state_dict(directory)
    # What the optimizer recorded beside its state is what was built; the content metadata is what
    # a caller said.
    found = next(recorded_types(common), None) or (common.get("content_metadata") or {}).get(
        TYPE_KEY
    )
    if found == DEAD:
        raise CheckpointError(
            "this checkpoint's optimizer is in a format that megatron-core dropped before 0.15",
            where=directory,
            got=DEAD,
            expected="fully_reshardable or dp_reshardable",
            next_step="load it with megatron-core 0.13 and save it as fully_reshardable, or load"
            " the model without the optimizer",
        )
    return found


@FIX.wraps(TRAINING, "_build_sharded_state_dict_metadata", takes("args"), optional=True)
def _content_metadata(original: Any, hit: Hit, args: Any, *rest: Any, **kwargs: Any) -> Any:
    hit()
    metadata = original(args, *rest, **kwargs)
    requested = metadata.get(TYPE_KEY)
    if requested is not None:
        metadata[TYPE_KEY] = settle_type(args, requested, False)
    return metadata

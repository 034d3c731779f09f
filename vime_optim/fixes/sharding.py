"""fully_reshardable under PAO with CPU offload, a working default, and the recorded type on load.

Symptom: a run with PAO and CPU offload cannot be resumed from dp_reshardable on any release (F1 to
F3); a caller that passes no sharding type gets `flattened_range is not supported` (F16).
Cause: the default is a format that Megatron itself dropped, and nothing tells the caller.
Changes: the type is settled once, where a sharded state dict is asked for, so that it reaches the
key prefixes of ChainedOptimizer; save() records it in the content metadata; load() rebuilds the
state dict when the checkpoint records another type than the caller asked for; Megatron's own
training code builds its metadata with it, log line included.
Leaves alone: Megatron-FSDP; every other combination of optimizer and format.
Remove when: Megatron enforces or fixes the combination itself.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

from vime_optim import settings
from vime_optim.errors import CheckpointError, OptimizerStateError
from vime_optim.registry import Fix, Hit, Target, takes

TYPE_KEY = "distrib_optim_sharding_type"
RECORD_KEY = "param_state_sharding_type"
FULLY = "fully_reshardable"
DEAD = "fully_sharded_model_space"
"""Megatron's default type; its flattened ranges were dropped before 0.15."""

_FROZEN_AT_START = 1000
"""More than Python 3.12 freezes by itself (375 objects); a user's gc.freeze() takes 100,000."""

logger = logging.getLogger("vime_optim")
_inside = threading.local()
_warned = False


class ShardedOptimizerState(dict[Any, Any]):
    """What sharded_state_dict(is_loading=True) gave, able to be built anew for another type."""

    sharding_type: str
    rebuild: Callable[[str], dict[Any, Any]]
    refusal: Exception | None = None
    """Why Megatron cannot build this type for this model; matters if the checkpoint is of it."""


def settle_type(config: Any, requested: str | None, is_loading: bool) -> str:
    """The sharding type to use instead of `requested`.

    Raises:
        OptimizerStateError: the policy is 'error' and a save asks for another type.
    """
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


def _wrap_sharded_state_dict(original: Any, hit: Hit) -> Any:
    """Serves ChainedOptimizer and DistributedOptimizer; only the outermost call decides."""

    def sharded_state_dict(
        self: Any, model_sharded_state_dict: Any, is_loading: bool = False, *args: Any, **kw: Any
    ) -> Any:
        if getattr(_inside, "yes", False):
            return original(self, model_sharded_state_dict, is_loading, *args, **kw)
        bound = _bind(original, self, model_sharded_state_dict, is_loading, *args, **kw)
        metadata = dict(bound.get("metadata") or {})
        requested = bound.pop("sharding_type", None) or metadata.get(TYPE_KEY)
        config = getattr(self, "config", None)
        hit()

        def build(sharding_type: str) -> Any:
            bound["metadata"] = {**metadata, TYPE_KEY: sharding_type}
            _inside.yes = True
            try:
                with _collecting_new_garbage_only():
                    return original(**bound)
            finally:
                _inside.yes = False

        chosen = settle_type(config, requested, is_loading)
        if not is_loading:
            return build(chosen)
        # The checkpoint may well be of another type (a save was made fully_reshardable), and then
        # this one need not be possible: dp_reshardable refuses small buckets on some ranks (F22).
        refusal = None
        try:
            result = build(chosen)
        except Exception as error:
            if chosen == FULLY:
                raise
            result, refusal = {}, error
        if not isinstance(result, dict):
            return result
        state = ShardedOptimizerState(result)
        state.sharding_type, state.rebuild, state.refusal = chosen, build, refusal
        return state

    return sharded_state_dict


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


def _bind(function: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Arguments by name, with those of **kwargs beside the others."""
    signature = inspect.signature(function)
    bound = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound.update(bound.pop(name, {}))
    return bound


def recorded_types(state: Any, depth: int = 4) -> Iterator[str]:
    """Sharding types recorded in a state dict, in whatever place the caller put the optimizer."""
    if not isinstance(state, dict) or depth == 0:
        return
    found = state.get(RECORD_KEY)
    if isinstance(found, str):
        yield found
    for value in state.values():
        yield from recorded_types(value, depth - 1)


def _wrap_save(original: Any, hit: Hit) -> Any:
    def save(*args: Any, **kwargs: Any) -> Any:
        hit()
        bound = _bind(original, *args, **kwargs)
        types = set(recorded_types(bound["sharded_state_dict"]))
        content = bound.get("content_metadata")
        if FULLY in types and (content or {}).get(TYPE_KEY) != FULLY:
            bound["content_metadata"] = {**(content or {}), TYPE_KEY: FULLY}
        return original(**bound)

    return save


def _wrap_load(original: Any, hit: Hit) -> Any:
    def load(*args: Any, **kwargs: Any) -> Any:
        hit()
        bound = _bind(original, *args, **kwargs)
        templates = list(_templates(bound["sharded_state_dict"]))
        if templates:
            saved = _type_of_checkpoint(str(bound["checkpoint_dir"]))
            for parent, key, state in templates:
                if saved is not None and saved != state.sharding_type:
                    logger.warning(
                        "vime_optim: the checkpoint is %s, not %s as asked; loading it as it is",
                        saved,
                        state.sharding_type,
                    )
                    parent[key] = state.rebuild(saved)
                elif state.refusal is not None:
                    raise state.refusal
        return original(**bound)

    return load


def _templates(
    state: Any, depth: int = 4
) -> Iterator[tuple[dict[Any, Any], Any, ShardedOptimizerState]]:
    if depth == 0 or not isinstance(state, dict):
        return
    for key, value in list(state.items()):
        if isinstance(value, ShardedOptimizerState):
            yield state, key, value
        else:
            yield from _templates(value, depth - 1)


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


def _wrap_metadata(original: Any, hit: Hit) -> Any:
    def build_sharded_state_dict_metadata(args: Any, *rest: Any, **kwargs: Any) -> Any:
        hit()
        metadata = original(args, *rest, **kwargs)
        requested = metadata.get(TYPE_KEY)
        if requested is not None:
            metadata[TYPE_KEY] = settle_type(args, requested, False)
        return metadata

    return build_sharded_state_dict_metadata


_SERIALIZATION = "megatron.core.dist_checkpointing.serialization"

FIXES = (
    Fix(
        id="sharding",
        faults=("F16",),
        summary="fully_reshardable under PAO with CPU offload; the checkpoint's type on load",
        targets=(
            Target(
                "megatron.core.optimizer.distrib_optimizer",
                "DistributedOptimizer.sharded_state_dict",
                _wrap_sharded_state_dict,
                takes("model_sharded_state_dict", "is_loading", "metadata"),
            ),
            Target(
                "megatron.core.optimizer.optimizer",
                "ChainedOptimizer.sharded_state_dict",
                _wrap_sharded_state_dict,
                takes("model_sharded_state_dict", "is_loading"),
            ),
            Target(
                _SERIALIZATION,
                "save",
                _wrap_save,
                takes("sharded_state_dict", "checkpoint_dir", "content_metadata"),
            ),
            Target(
                _SERIALIZATION, "load", _wrap_load, takes("sharded_state_dict", "checkpoint_dir")
            ),
            Target(
                "megatron.training.checkpointing",
                "_build_sharded_state_dict_metadata",
                _wrap_metadata,
                takes("args"),
                optional=True,
            ),
        ),
    ),
)

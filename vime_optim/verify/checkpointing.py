"""Saves and loads a job as Megatron's training does, through megatron.core.dist_checkpointing.

DIR/iter_0000003/                         one checkpoint
DIR/latest_checkpointed_iteration.txt     the newest one that is whole
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vime_optim.errors import CheckpointError
from vime_optim.verify.capture import is_rng_state, model_metadata, rng_state, set_rng_state
from vime_optim.verify.directory import TRACKER, iteration_dir
from vime_optim.verify.model import Job


class ForeignCheckpointError(CheckpointError):
    """A checkpoint of another model; nothing was loaded."""


def save(job: Job, directory: Path, schedule: Callable[[Any], None] | None) -> None:
    """Save the job's state after `job.iteration` steps.

    Args:
        schedule: None saves at once; otherwise it is given Megatron's AsyncRequest to run.
    """
    from megatron.core import dist_checkpointing

    target = iteration_dir(directory, job.iteration)
    if torch.distributed.get_rank() == 0:
        target.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    metadata = optimizer_metadata(job.case.sharding)
    state = _state_dict(job, metadata, is_loading=False)
    options: dict[str, Any] = {}
    if schedule is not None:
        options = {"async_sharded_save": True, **_async_strategy()}
    request = dist_checkpointing.save(
        state,
        str(target),
        content_metadata={key: metadata[key] for key in metadata if key != "dp_cp_group"},
        **options,
    )

    def finish(iteration: int = job.iteration) -> None:
        if torch.distributed.get_rank() == 0:
            (directory / TRACKER).write_text(str(iteration))

    if schedule is None:
        torch.distributed.barrier()
        finish()
        torch.distributed.barrier()
    else:
        request.add_finalize_fn(finish)
        schedule(request)


def _async_strategy() -> dict[str, str]:
    """megatron-core 0.17+ would take its writer from another package unless told otherwise."""
    import inspect

    from megatron.core import dist_checkpointing

    known = inspect.signature(dist_checkpointing.save).parameters
    return {"async_strategy": "mcore"} if "async_strategy" in known else {}


def optimizer_metadata(sharding: str | None) -> dict[str, Any]:
    """What Megatron's training passes to sharded_state_dict; no type at all for None."""
    metadata = model_metadata()
    if sharding is not None:
        metadata["distrib_optim_sharding_type"] = sharding
    if sharding == "fully_reshardable":
        metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    return metadata


def _state_dict(
    job: Job, metadata: dict[str, Any], *, is_loading: bool, with_optimizer: bool = True
) -> dict[str, Any]:
    state: dict[str, Any] = {
        "checkpoint_version": 3.0,
        "iteration": job.iteration,
        "consumed_samples": job.consumed_samples,
        "model": job.gpt.sharded_state_dict(metadata=metadata),
    }
    if with_optimizer:
        state["optimizer"] = job.optimizer.sharded_state_dict(
            state, is_loading=is_loading, metadata=metadata
        )
        state["opt_param_scheduler"] = job.scheduler.state_dict()
    if not is_loading or job.case.layout.tp == job.layout.tp:
        state["rng_state"] = _sharded_rng_state()
    return state


def _sharded_rng_state() -> Any:
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    pipeline = parallel_state.get_pipeline_model_parallel_rank()
    tensor = parallel_state.get_tensor_model_parallel_rank()
    return ShardedObject(
        "rng_state",
        rng_state(),
        (
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_world_size(),
        ),
        (pipeline, tensor),
        replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )


def load(job: Job, directory: Path, iteration: int) -> dict[str, Any]:
    """Load into a fresh job; with `case.model_only` the weights alone.

    Generator states come back when the model-parallel sizes are those of the save, as in Megatron;
    otherwise they are seeded anew from the iteration, the same on every rank.

    Returns:
        `rng_untouched`: whether loading the optimizer left every generator where it was.
    """
    from megatron.core import dist_checkpointing

    source = iteration_dir(directory, iteration)
    metadata = dist_checkpointing.load_content_metadata(str(source)) or {}
    metadata["dp_cp_group"] = model_metadata()["dp_cp_group"]
    before = rng_state()
    with_optimizer = not job.case.model_only
    template = _state_dict(job, metadata, is_loading=True, with_optimizer=with_optimizer)
    if not job.same_model_parallel:
        template.pop("rng_state", None)
    check_same_model(template["model"], source)
    loaded = dist_checkpointing.load(template, str(source))
    job.gpt.load_state_dict(loaded["model"])
    if with_optimizer:
        job.optimizer.load_state_dict(loaded["optimizer"])
        job.scheduler.load_state_dict(loaded["opt_param_scheduler"])
    else:
        job.optimizer.reload_model_params()
    untouched = is_rng_state(before)
    job.iteration = loaded["iteration"]
    job.consumed_samples = loaded["consumed_samples"]
    if job.same_model_parallel:
        set_rng_state(loaded["rng_state"])
    else:
        job.seed_anew()
    return {"rng_untouched": untouched}


def check_same_model(model_template: dict[str, Any], source: Path) -> None:
    """This model's tensors, over all ranks, are those in the checkpoint, with the same shapes.

    Raises:
        ForeignCheckpointError: names what differs. Nothing was changed.
    """
    from megatron.core import dist_checkpointing

    stored = {
        key: tuple(tensor.global_shape)
        for key, tensor in dist_checkpointing.load_tensors_metadata(str(source)).items()
        if not re.match(r"(chained_\d+\.)?optimizer\.", key)
    }
    here: dict[str, tuple[int, ...]] = {}
    by_rank: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(by_rank, _global_shapes(model_template))
    for shapes in by_rank:
        here.update(shapes)
    wrong = [
        f"{key}: {stored.get(key, 'nothing')} there, {here.get(key, 'nothing')} here"
        for key in sorted({*stored, *here})
        if stored.get(key) != here.get(key)
    ]
    if wrong:
        raise ForeignCheckpointError(
            "the checkpoint is of another model",
            where=str(source),
            got=f"{len(wrong)} tensors do not fit, such as " + "; ".join(wrong[:3]),
            next_step="load it with the model that it was saved with",
        )


def _global_shapes(model_template: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Global shape by checkpoint key of every tensor that this rank holds a part of."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

    shapes: dict[str, tuple[int, ...]] = {}
    sharded, _ = extract_sharded_tensors_and_factories(model_template)
    for part in nested_values(sharded):
        tensors = [part] if isinstance(part, ShardedTensor) else nested_values(part.build())
        shapes.update({tensor.key: tuple(tensor.global_shape) for tensor in tensors})
    return shapes

"""Saves a deep copy of a state dict, steps later, and loads into a deep copy of a template."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import torch

from vime_optim.verify import checkpointing, job
from vime_optim.verify.capture import model_metadata, set_rng_state
from vime_optim.verify.directory import iteration_dir
from vime_optim.verify.train import train


def save(payload: dict[str, Any]) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    case, built = job._start(payload, loading=False)
    train(built, case.num_steps)
    job._capture(payload, built, f"saved_{case.num_steps}")
    metadata = checkpointing.optimizer_metadata(case.sharding)
    state = copy.deepcopy(checkpointing._state_dict(built, metadata, is_loading=False))
    del metadata["dp_cp_group"]
    train(built, case.total_steps)
    target = iteration_dir(Path(payload["directory"]), case.num_steps)
    target.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    dist_checkpointing.save(state, str(target), content_metadata=metadata)
    return job._finish(payload, built, "continuous")


def resume(payload: dict[str, Any]) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    case, built = job._start(payload, loading=True)
    source = str(iteration_dir(Path(payload["directory"]), payload["step"]))
    metadata = dist_checkpointing.load_content_metadata(source) or {}
    metadata["dp_cp_group"] = model_metadata()["dp_cp_group"]
    template = checkpointing._state_dict(built, metadata, is_loading=True)
    if payload["pickles"]:
        assert len(pickle.loads(pickle.dumps(template["optimizer"]))) == len(template["optimizer"])
    template["optimizer"] = copy.deepcopy(template["optimizer"])
    loaded = dist_checkpointing.load(template, source)
    built.gpt.load_state_dict(loaded["model"])
    built.optimizer.load_state_dict(loaded["optimizer"])
    built.scheduler.load_state_dict(loaded["opt_param_scheduler"])
    set_rng_state(loaded["rng_state"])
    built.iteration, built.consumed_samples = loaded["iteration"], loaded["consumed_samples"]
    job._capture(payload, built, "loaded")
    train(built, case.total_steps)
    return job._finish(payload, built, "resumed")

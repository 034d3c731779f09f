"""The last pipeline stage leaves its optimizer out of a load, as where it is to start anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vime_optim.verify import checkpointing, job
from vime_optim.verify.capture import model_metadata, set_rng_state
from vime_optim.verify.directory import iteration_dir
from vime_optim.verify.train import train


def resume(payload: dict[str, Any]) -> dict[str, Any]:
    """`asked`: the optimizer gives a template there, too, and it is not used. Stock's state is then
    uninitialised memory."""
    from megatron.core import dist_checkpointing, parallel_state

    case, built = job._start(payload, loading=True)
    source = iteration_dir(Path(payload["directory"]), payload["step"])
    metadata = dist_checkpointing.load_content_metadata(str(source)) or {}
    metadata["dp_cp_group"] = model_metadata()["dp_cp_group"]
    takes = not parallel_state.is_pipeline_last_stage()
    template = checkpointing._state_dict(
        built, metadata, is_loading=True, with_optimizer=takes or payload["asked"]
    )
    if not takes:
        template.pop("optimizer", None)
    loaded = dist_checkpointing.load(template, str(source))
    built.gpt.load_state_dict(loaded["model"])
    if takes:
        built.optimizer.load_state_dict(loaded["optimizer"])
        built.scheduler.load_state_dict(loaded["opt_param_scheduler"])
    else:
        built.optimizer.reload_model_params()
    built.iteration = loaded["iteration"]
    built.consumed_samples = loaded["consumed_samples"]
    set_rng_state(loaded["rng_state"])
    job._capture(payload, built, f"loaded_{payload['name']}")
    train(built, case.total_steps)
    return job._finish(payload, built, payload["name"])

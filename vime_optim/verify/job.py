"""The functions that launches run on every rank. Each takes and returns plain data.

Payload: `case` (Case.to_dict(); `type` names the class of a test's), `directory` (checkpoints),
`captures` (folder for captures), and `step` for the phases that start from a checkpoint.
"""

from __future__ import annotations

import pkgutil
from pathlib import Path
from typing import Any

import torch

from vime_optim.verify import checkpointing, training, transplant
from vime_optim.verify.capture import capture
from vime_optim.verify.case import Case
from vime_optim.verify.model import Builder, Job
from vime_optim.verify.train import train


def continuous(payload: dict[str, Any]) -> dict[str, Any]:
    """Train all steps and never save: what a resumed run must equal."""
    case, job = _start(payload, loading=False)
    train(job, case.total_steps)
    return _finish(payload, job, "continuous")


def save(payload: dict[str, Any]) -> dict[str, Any]:
    """Train all steps and save at the case's save steps; state is captured at each of them."""
    case, job = _start(payload, loading=False)
    directory = Path(payload["directory"])
    queue = _async_queue(case)

    def after_step(job: Job) -> None:
        if queue is not None:
            queue.maybe_finalize_async_calls(blocking=False)
        if job.iteration in case.save_steps:
            _capture(payload, job, f"saved_{job.iteration}")
            schedule = None if queue is None else queue.schedule_async_request
            if case.via_training:
                training.save(job, directory)
            else:
                checkpointing.save(job, directory, schedule)

    after_step(job)  # a case may save before the first step
    train(job, case.total_steps, after_step)
    if queue is not None:
        queue.maybe_finalize_async_calls(blocking=True)
        queue.close()
    return _finish(payload, job, "after_save")


def resume(payload: dict[str, Any]) -> dict[str, Any]:
    """Build with another seed, load, capture, train the steps that are left, capture."""
    case, job = _start(payload, loading=True)
    load = training.load if case.via_training else checkpointing.load
    facts = load(job, Path(payload["directory"]), payload["step"])
    facts["memory"] = _capture(payload, job, "loaded")
    train(job, case.total_steps)
    return {**facts, **_finish(payload, job, "resumed")}


def reference(payload: dict[str, Any]) -> dict[str, Any]:
    """What a resume in another layout must equal, made without loading a checkpoint.

    Trains as many steps as the saved run had, so that every counter is right by itself, then
    writes the captured weights, masters and moments into the raw optimizers, and trains on.
    """
    case, job = _start(payload, loading=True)
    if not case.model_only:
        train(job, payload["step"])
    transplant.apply(job, Path(payload["captures"]) / f"saved_{payload['step']}", payload["step"])
    train(job, case.total_steps)
    return _finish(payload, job, "reference")


def _start(payload: dict[str, Any], *, loading: bool) -> tuple[Case, Job]:
    values = payload["case"]
    kind: type[Case] = pkgutil.resolve_name(values["type"]) if "type" in values else Case
    case = kind.from_dict(values)
    builder: Builder = pkgutil.resolve_name(case.builder)(case, loading=loading)
    builder.prepare()
    if case.install:
        import vime_optim

        vime_optim.install()
    return case, builder.build()


def _capture(payload: dict[str, Any], job: Job, name: str) -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    return capture(job, Path(payload["captures"]) / name / f"rank{rank}.pt")


def _finish(payload: dict[str, Any], job: Job, name: str) -> dict[str, Any]:
    memory = _capture(payload, job, name)
    torch.distributed.barrier()
    return {"memory_at_end": memory, "iteration": job.iteration, "hits": _hits(job.case)}


def _hits(case: Case) -> dict[str, int]:
    """How often each fix was reached in this rank, by fix id."""
    if not case.install:
        return {}
    import vime_optim

    return dict(vime_optim.status().hits)


def _async_queue(case: Case) -> Any:
    if case.async_mode == "off":
        return None
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    return AsyncCallsQueue(persistent=case.async_mode == "persistent")

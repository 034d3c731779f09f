"""Puts a captured state into a running job, tensor by tensor, without any checkpoint code.

Used to make the reference of a resume in another layout: its training steps sum gradients in
another order than the first run, so it can only be compared with a run of the same layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vime_optim.simulate.fused_adam import split_master
from vime_optim.verify.capture import (
    ParameterState,
    parameter_places,
    parameter_states,
    set_rng_state,
)
from vime_optim.verify.compare import State, global_index, load_state, round_tied_masters
from vime_optim.verify.model import GLOBAL_BATCH_SIZE, Job


def apply(job: Job, folder: Path, iteration: int) -> None:
    """Write weights, masters and moments of a capture into the job's own tensors."""
    state = load_state(folder)
    places = parameter_places(job)
    with torch.no_grad():
        for parameter in job.gpt.parameters():
            flat = _local(state, "model", places[id(parameter)], parameter.numel())
            parameter.data.copy_(flat.view(parameter.shape))
        for own in parameter_states(job.optimizer):
            _write_state(job, state, places[id(own.model_parameter)], own)
    job.iteration = iteration
    job.consumed_samples = iteration * GLOBAL_BATCH_SIZE
    _set_generators(job, folder)


def _write_state(job: Job, state: State, place: list[dict[str, Any]], own: ParameterState) -> None:
    numel = own.model_parameter.numel()
    part = slice(own.start, own.end)
    source = "model" if job.case.model_only else "master"
    _write_master(own, _local(state, source, place, numel)[part].float())
    if job.case.model_only:
        return
    for kind in own.tensors:
        _write_moment(own, kind, _local(state, kind, place, numel)[part])


def _write_master(own: ParameterState, value: torch.Tensor) -> None:
    stored = own.stored.get("master_param")
    if stored is None:
        if own.leaf.dtype == torch.float32:
            own.leaf.data.copy_(value)
            # A 16-bit outer leaf is the model's own shard, which is set already and may have been
            # rounded in another way.
            if own.outer_leaf is not own.leaf and own.outer_leaf.dtype == torch.float32:
                own.outer_leaf.data.copy_(value)
    elif stored.dtype == torch.int16:
        _write_remainder(own.leaf.data, stored, value)
    else:
        _write_moment(own, "master_param", value)


def _write_remainder(leaf: torch.Tensor, stored: torch.Tensor, value: torch.Tensor) -> None:
    """Code a float32 master beside its bf16 parameter, which is set already.

    Where the parameter was rounded half to even and lies below a tie, see round_tied_masters.
    """
    even = round_tied_masters(value)
    tied = even.view(torch.int32) != value.view(torch.int32)
    just_below = split_master(value)[0].view(torch.int16) - 1
    below = tied & (leaf.view(torch.int16).cpu() == just_below)
    param, remainder = split_master(torch.where(below, even, value))
    stored.copy_(remainder)
    leaf.copy_(param)


def _write_moment(own: ParameterState, kind: str, value: torch.Tensor) -> None:
    if kind in own.scales:
        own.owner.set_scaled_state(own.leaf, kind, value.float().to(own.leaf.device))
    else:
        own.tensors.get(kind, own.stored[kind]).copy_(value)


def _local(state: State, kind: str, place: list[dict[str, Any]], numel: int) -> torch.Tensor:
    """The flat local parameter of one place, cut out of the global tensors."""
    first = state.tensors[kind, place[0]["key"]]
    flat = torch.zeros(numel, dtype=first.dtype)
    for part in place:
        flat[part["index"]] = state.tensors[kind, part["key"]].view(-1)[global_index(part)]
    return flat


def _set_generators(job: Job, folder: Path) -> None:
    """The generator states that a load gives, see checkpoint.load."""
    if not job.same_model_parallel:
        job.seed_anew()
        return
    # The saved state of this tensor and pipeline rank; data-parallel ranks hold the same.
    record = torch.load(folder / f"rank{_saved_rank(job)}.pt", weights_only=True)
    set_rng_state(record["rng"])


def _saved_rank(job: Job) -> int:
    """A rank of the saved launch with this rank's tensor and pipeline coordinates."""
    from megatron.core import parallel_state

    tensor = parallel_state.get_tensor_model_parallel_rank()
    pipeline = parallel_state.get_pipeline_model_parallel_rank()
    layout = job.case.layout
    return int(tensor + layout.tp * layout.dp * pipeline)

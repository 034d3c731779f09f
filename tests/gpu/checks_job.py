"""What a CPU cannot show: copy order, pinned memory, growth over rounds, added synchronisations.

Each function runs on every rank of a resident launch; see test_checks.py. Payload: `case`,
`directory`.
"""

from __future__ import annotations

import gc
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from vime_optim.verify import checkpointing, job
from vime_optim.verify.capture import chained
from vime_optim.verify.model import Job
from vime_optim.verify.train import train

#: Clock cycles that a stream is held up; some 0.3 s.
HELD_UP_CYCLES = 500_000_000
#: What a step may call that waits for the device.
WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")


def rounds(payload: dict[str, Any]) -> dict[str, Any]:
    """Save and load `rounds` times; device bytes and pinned host tensors after each.

    The first entry is from before all saves.
    """
    _, built = job._start(payload, loading=False)
    train(built, 1)
    directory = Path(payload["directory"])
    gc.collect()
    torch.cuda.synchronize()
    seen = [{"device_bytes": torch.cuda.memory_allocated(), **_host_tensors(built)}]
    for _ in range(payload["rounds"]):
        checkpointing.save(built, directory, None)
        checkpointing.load(built, directory, built.iteration)
        gc.collect()
        torch.cuda.synchronize()
        seen.append({"device_bytes": torch.cuda.memory_allocated(), **_host_tensors(built)})
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            shutil.rmtree(directory)
        torch.distributed.barrier()
    return {"rounds": seen}


def _host_tensors(built: Job) -> dict[str, int]:
    """Number and bytes of the optimizer's host tensors, and how many of them are pinned."""
    tensors = [
        tensor
        for member in chained(built.optimizer)
        for part in getattr(member.optimizer, "sub_optimizers", [member.optimizer])
        for group in part.param_groups
        for param in group["params"]
        for tensor in (param, *part.state.get(param, {}).values())
        if isinstance(tensor, torch.Tensor) and not tensor.is_cuda and tensor.dim()
    ]
    pinned = sum(tensor.is_pinned() for tensor in tensors)
    total = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    return {"host_tensors": len(tensors), "pinned": pinned, "host_bytes": total}


def waits_of_a_step(payload: dict[str, Any]) -> dict[str, int]:
    """CUDA runtime calls that wait for the device in one training step, by name."""
    _, built = job._start(payload, loading=False)
    train(built, 3)
    torch.cuda.synchronize()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as profile:
        train(built, built.iteration + 1)
    found = Counter(event.name for event in profile.events())
    return {name: found[name] for name in (*WAITS, "cudaMemcpyAsync")}


def copy_back(payload: dict[str, Any]) -> dict[str, Any]:
    """Hold up the stream that copies parameters back, step, and read them on the main stream."""
    _, built = job._start(payload, loading=False)
    train(built, 1)
    for hybrid in _hybrids(built):
        _hold_up_before_steps(hybrid, hybrid._h2d_stream)
    stale = 0
    for _ in range(payload["rounds"]):
        train(built, built.iteration + 1)
        # Reads are queued behind the step, as those of the next forward pass are.
        read = {
            param: param.detach().clone()
            for hybrid in _hybrids(built)
            for param in hybrid.gpu_params_map_cpu_copy
        }
        torch.cuda.synchronize()
        for hybrid in _hybrids(built):
            for param, copy in hybrid.gpu_params_map_cpu_copy.items():
                stale += int(not torch.equal(read[param], copy.detach().to(param)))
    return {"stale_reads": stale, "hits": job._hits(built.case)}


def cast_gradients(payload: dict[str, Any]) -> dict[str, Any]:
    """Hold up the stream that casts gradients; what the device's half holds after each step."""
    from megatron.core import distributed

    config = distributed.DistributedDataParallelConfig

    def with_16_bit_gradients(**values: Any) -> Any:
        return config(**{**values, "grad_reduce_in_fp32": False})

    distributed.DistributedDataParallelConfig = with_16_bit_gradients
    try:
        case, built = job._start(payload, loading=False)
    finally:
        distributed.DistributedDataParallelConfig = config
    if payload["hold_up"]:
        for hybrid in _hybrids(built):
            _hold_up_before_steps(hybrid, hybrid._d2h_stream)
    while built.iteration < case.total_steps:
        train(built, built.iteration + 1)
        torch.cuda.synchronize()
    return job._finish(payload, built, payload["name"])


def _hold_up_before_steps(hybrid: Any, stream: Any) -> None:
    """Give a stream something to do right before each step, so that the step's copies are late."""

    def hold_up(*_: Any) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(HELD_UP_CYCLES)

    hybrid.register_step_pre_hook(hold_up)


def _hybrids(built: Job) -> list[Any]:
    return [member.optimizer for member in chained(built.optimizer)]

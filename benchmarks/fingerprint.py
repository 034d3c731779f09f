"""Fingerprints of a whole training state that do not depend on how it is sharded.

A tensor's fingerprint is the sum, modulo 2**64, of the bits of each element times an odd number
that follows from the element's place in the global tensor. Shards add up to it, whatever the
layout, so nothing of the state is stored or moved to compare it. One differing element always
changes it; several do so but for one chance in 2**64. `vime-optim verify` compares every bit
itself, at sizes where that is cheap.

A fingerprint record is {"name": [sum, elements]}, and {"name": value} for what is no tensor.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from vime_optim.verify.capture import model_metadata, parameter_states, rng_state

CHUNK_NUMEL = 1 << 24
#: Odd multipliers of a 64-bit mixing function (splitmix64), as signed integers.
_MIX = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Part:
    """A run of a local parameter's flat elements, from `start`: a box of a global tensor."""

    key: str
    start: int
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    global_shape: tuple[int, ...]


def fingerprint(job: Any) -> tuple[dict[str, Any], list[str]]:
    """The record of the whole job, the same on every rank, and what replicas disagree in."""
    local = dict(_local_records(job))
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, local)
    sums: dict[str, dict[Any, list[int]]] = {}
    record: dict[str, Any] = {}
    conflicts = []
    for rank, entries in enumerate(everyone):
        for (name, replica), value in entries.items():
            if isinstance(value, list):
                total = sums.setdefault(name, {}).setdefault(replica, [0, 0])
                total[0] = (total[0] + value[0]) % 2**64
                total[1] += value[1]
            elif record.setdefault(name, value) != value:
                conflicts.append(f"{name}: rank {rank} has {value}, others {record[name]}")
    for name, by_replica in sums.items():
        record[name] = next(iter(by_replica.values()))
        if any(value != record[name] for value in by_replica.values()):
            conflicts.append(f"{name}: its {len(by_replica)} replicas differ")
    return record, conflicts


def differences(expected: dict[str, Any], got: dict[str, Any], skip: tuple[str, ...]) -> list[str]:
    """Names whose records differ, without the kinds in `skip` (what a name begins with)."""
    names = sorted(name for name in {*expected, *got} if not name.startswith(skip))
    return [name for name in names if expected.get(name) != got.get(name)]


def _local_records(job: Any) -> Iterator[tuple[tuple[str, Any], Any]]:
    from megatron.core import parallel_state

    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    data_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    places = parameter_parts(job)
    found: dict[tuple[str, Any], Any] = {}

    def add(parameter: Any, kind: str, flat: torch.Tensor, start: int, replica: int) -> None:
        copied = not getattr(parameter, "tensor_model_parallel", False)
        key = (replica, tensor_rank if copied else 0)
        for part in places[id(parameter)]:
            total = found.setdefault((f"{kind} {part.key}", key), [0, 0])
            value, numel = _sum(part, flat, start, job.device)
            total[0] = (total[0] + value) % 2**64
            total[1] += numel

    for parameter in job.gpt.parameters():
        add(parameter, "model", parameter.detach().view(-1), 0, data_rank)
    for state in parameter_states(job.optimizer):
        parameter, start = state.model_parameter, state.start
        grad = parameter.main_grad.view(-1)[start : state.end]
        for kind, tensor in {"master": state.master, "grad": grad, **state.tensors}.items():
            add(parameter, kind, tensor.detach().reshape(-1), start, 0)
        for part in places[id(parameter)]:
            found[f"step {part.key}", 0] = state.step
            for name, value in state.group.items():
                found[f"group.{name} {part.key}", 0] = value
    for name, value in job.scheduler.state_dict().items():
        found[f"scheduler {name}", 0] = value
    found["job iteration", 0] = job.iteration
    found["job data_cursor", 0] = job.consumed_samples
    for name, tensor in rng_state().items():
        digest = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        found[f"rng {name} of tensor rank {tensor_rank}", 0] = digest
    yield from found.items()


def parameter_parts(job: Any) -> dict[int, list[Part]]:
    """The parts of each local parameter, by its `id`, as the model's own sharding says.

    Factories (SwiGLU) are asked with a tensor without memory; the parts are runs of its elements.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    result: dict[int, list[Part]] = {}
    for sharded in nested_values(job.gpt.sharded_state_dict(metadata=model_metadata())):
        if not isinstance(sharded, (ShardedTensor, ShardedTensorFactory)) or sharded.data is None:
            continue
        parts = [sharded]
        if isinstance(sharded, ShardedTensorFactory):
            probe = torch.empty(sharded.data.shape, device="meta")
            parts = nested_values(replace(sharded, data=probe).build())
        result.setdefault(id(sharded.data), [_part(part) for part in parts])
    return result


def _part(sharded: Any) -> Part:
    data = sharded.data
    start = 0
    if data.device.type == "meta":
        start = data.storage_offset()
        if not data.is_contiguous():
            raise NotImplementedError(f"the parts of {sharded.key} are not runs of its elements")
    shape = (1,) * sharded.prepend_axis_num + tuple(data.shape)
    return Part(
        sharded.key, start, shape, tuple(sharded.global_offset), tuple(sharded.global_shape)
    )


def _sum(part: Part, flat: torch.Tensor, flat_start: int, device: torch.device) -> tuple[int, int]:
    """Sum and count of those elements of `part` that `flat`, at `flat_start`, holds."""
    begin = max(part.start, flat_start)
    end = min(part.start + math.prod(part.shape), flat_start + flat.numel())
    total = 0
    for low in range(begin, end, CHUNK_NUMEL):
        high = min(end, low + CHUNK_NUMEL)
        chunk = flat[low - flat_start : high - flat_start].to(device).contiguous()
        values = chunk.view(_INTEGERS[chunk.element_size()]).to(torch.int64)
        weights = _weights(part, low - part.start, high - part.start, device)
        total += int((values * weights).sum())
    return total % 2**64, max(0, end - begin)


def _weights(part: Part, low: int, high: int, device: torch.device) -> torch.Tensor:
    """Odd int64 numbers that follow from the places of a part's elements [low, high)."""
    rest = torch.arange(low, high, device=device)
    place = torch.zeros_like(rest)
    stride = 1
    for size, offset, length in zip(
        reversed(part.shape), reversed(part.offset), reversed(part.global_shape), strict=True
    ):
        place += (rest % size + offset) * stride
        rest = rest // size
        stride *= length
    for factor in _MIX:
        place = (place ^ (place >> 30)) * factor
    return (place ^ (place >> 31)) | 1

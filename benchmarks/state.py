"""A real Megatron job of a given size: GPT, DDP, distributed optimizer, one cheap step.

Gradients are random numbers written into the gradient buffer, so that no forward pass is needed.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from vime_optim.verify.capture import ParameterState, model_metadata, parameter_states
from vime_optim.verify.case import Backend
from vime_optim.verify.model import (
    data_parallel,
    half_precision,
    of_backend,
    optimizer_config,
    plain_gpt,
)


@dataclass(frozen=True)
class Size:
    """Sizes of a GPT with SwiGLU, in elements."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    vocab: int


SIZES = {
    "2m": Size(128, 352, 4, 4, 4000),
    "45m": Size(512, 1408, 8, 8, 18000),
    "0.1b": Size(768, 2112, 8, 12, 32000),
    "0.2b": Size(1024, 2816, 10, 16, 32000),
    "0.6b": Size(1536, 4224, 17, 12, 32000),
    "1.2b": Size(2048, 5632, 21, 16, 32000),
    "2.4b": Size(2560, 7040, 28, 20, 32000),
    # The largest for stock fully_reshardable with HybridDeviceOptimizer in 256 GiB (fit.py).
    "2.6b": Size(2560, 7040, 30, 20, 32000),
    "4b": Size(3072, 8448, 33, 24, 32000),
    # The largest for vime_optim there. The FFN is 2 times as wide as the model, since gradients in
    # pinned memory take powers of two: 8192 adds 10% to them, 11264 would add 39% (11 GB).
    "8b": Size(4096, 8192, 46, 32, 32000),
}

#: Word on the command line to backend; `hybrid` is HybridDeviceOptimizer, `fused` is FusedAdam.
BACKENDS = {
    "hybrid": Backend("hybrid", 1.0, True),
    "hybrid-half": Backend("hybrid", 0.5, True),
    # Stock megatron-core cannot load fully_reshardable with remainders, on any release.
    "fused": Backend("fused", 0.0, True, remainders=False),
    "fused-rem": Backend("fused", 0.0, True, remainders=True),
    "fused-nopao": Backend("fused", 0.0, False),
}


#: Elements that are summed at once: int64 copies that stay in a processor's cache, or small.
_SUM_NUMEL = 1 << 19
_DEVICE_SUM_NUMEL = 1 << 24


@dataclass
class Job:
    """One rank's model and optimizer."""

    ddp: Any
    gpt: Any
    optimizer: Any


def build(size: Size, backend: Backend, *, simulated: bool) -> Job:
    """Build and train for one step. Model parallelism must be initialized, without TP and PP."""
    from megatron.core import tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import get_megatron_optimizer

    torch.manual_seed(1234)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    config = _transformer_config(size, simulated)
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=size.vocab,
        max_sequence_length=128,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    device = torch.device("cuda", torch.cuda.current_device())
    # One bucket: with several padded ones stock fully_reshardable files are wrong.
    ddp = data_parallel(half_precision(gpt, device), overlap_grad_reduce=False)
    config = optimizer_config({**of_backend(backend), "lr": 1e-3, "weight_decay": 0.01})
    job = Job(ddp, gpt, get_megatron_optimizer(config, [ddp]))
    step(job)
    # HybridDeviceOptimizer is set up twice; the first masters are garbage in a cycle.
    gc.collect()
    return job


def step(job: Job) -> None:
    """One optimizer step with random gradients; ranks need not agree on what they do not own."""
    for buffer in job.ddp.buffers:
        buffer.grad_data.normal_(std=1e-3)
    job.optimizer.step()
    job.ddp.zero_grad_buffer()


def _transformer_config(size: Size, simulated: bool) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=size.layers,
        hidden_size=size.hidden,
        num_attention_heads=size.heads,
        ffn_hidden_size=size.ffn,
        use_cpu_initialization=simulated,
        **plain_gpt(),
    )


def sharded_state(job: Job, sharding: str, *, is_loading: bool) -> dict[str, Any]:
    """Weights and optimizer as Megatron's training hands them to dist_checkpointing."""
    metadata = model_metadata()
    metadata["distrib_optim_sharding_type"] = sharding
    if sharding == "fully_reshardable":
        metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    state: dict[str, Any] = {"iteration": 1, "model": job.gpt.sharded_state_dict(metadata=metadata)}
    state["optimizer"] = job.optimizer.sharded_state_dict(
        state, is_loading=is_loading, metadata=metadata
    )
    return state


def state_tensors(job: Job) -> Iterator[tuple[str, torch.Tensor]]:
    """The optimizer's moments and masters; FusedAdam's masters may be the 16 low bits alone."""
    for number, state in enumerate(parameter_states(job.optimizer)):
        master = _master(state)
        if master is not None:
            yield f"{number}.master", master.detach()
        for kind, tensor in state.stored.items():
            if kind not in ("step", "master_param"):
                yield f"{number}.{kind}", tensor.detach()


def _master(state: ParameterState) -> torch.Tensor | None:
    """A float32 parameter is its own master; else the optimizer keeps one, or has none."""
    if state.leaf.dtype == torch.float32:
        return state.leaf
    return state.stored.get("master_param")


def own_and_held_bytes(job: Job) -> tuple[int, int]:
    """Bytes of the optimizer's moments and masters, and of all storages that its state keeps."""
    own = sum(tensor.numel() * tensor.element_size() for _, tensor in state_tensors(job))
    held: dict[int, int] = {}
    for state in parameter_states(job.optimizer):
        master = _master(state)
        kept = [tensor for kind, tensor in state.stored.items() if kind != "step"]
        for tensor in [*kept, *([] if master is None else [master])]:
            storage = tensor.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    return own, sum(held.values())


def checksums(job: Job) -> dict[str, int]:
    """Sum of the bits of every state tensor, as integers; cheap, and any lost part changes it."""
    kinds = {2: torch.int16, 4: torch.int32}
    return {
        name: _sum(tensor.reshape(-1).view(kinds[tensor.element_size()]))
        for name, tensor in state_tensors(job)
    }


def _sum(flat: torch.Tensor) -> int:
    """Sum of integers. torch sums an int64 copy, which here is of a part, in a reused buffer."""
    most = _SUM_NUMEL if flat.device.type == "cpu" else _DEVICE_SUM_NUMEL
    buffer = torch.empty(min(most, flat.numel()), dtype=torch.int64, device=flat.device)
    total = 0
    for start in range(0, flat.numel(), most):
        part = flat[start : start + most]
        total += int(buffer[: part.numel()].copy_(part).sum())
    return total


def poison(job: Job) -> None:
    """Overwrite the state, so that only a load brings it back."""
    for _, tensor in state_tensors(job):
        tensor.fill_(7)


def own_storages(job: Job) -> None:
    """Give every state a storage of its own again, as a new optimizer has it.

    Stock megatron-core swaps in views of what it read, and copies of masters, which would count
    against whoever is measured next.
    """
    for state in parameter_states(job.optimizer):
        held = state.owner.state[state.leaf]
        for kind, tensor in list(state.stored.items()):
            if kind == "master_param" and state.leaf.dtype == torch.float32:
                held[kind] = state.leaf
            elif tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
                held[kind] = tensor.clone()

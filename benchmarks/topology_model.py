"""The job of topology8.py: a Qwen3-4B shape under tensor, sequence, context and data parallelism.

Full recompute; Adam with CPU offload of everything, overlap and the precision-aware optimizer. The
layers are megatron-core's own local ones. Two of them refuse this topology without Transformer
Engine, so two small stand-ins take their places: a torch RMSNorm whose weight is marked for
sequence parallelism, and an attention that gathers keys and values over the context-parallel group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.state import BACKENDS
from vime_optim.verify.case import Case, Layout
from vime_optim.verify.model import (
    Job,
    build_scheduler,
    data_parallel,
    half_precision,
    of_backend,
    optimizer_config,
    plain_gpt,
    seed_everything,
)
from vime_optim.verify.train import forward_step

GLOBAL_BATCH_SIZE = 4
WIDTH = 2560
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Shape:
    """Sizes of the model in elements, scaled from Qwen3-4B by its width (a multiple of 40)."""

    width: int = WIDTH
    layers: int = 36
    sequence: int = 1024

    heads: int = 32
    query_groups: int = 8

    def __post_init__(self) -> None:
        if self.width % 40 or self.width < 40:
            raise SystemExit(f"--width must be a multiple of 40, not {self.width}")

    @property
    def head_size(self) -> int:
        return self.width // 20

    @property
    def ffn(self) -> int:
        return self.width * 19 // 5

    @property
    def vocabulary(self) -> int:
        return 151936 * self.width // WIDTH // 64 * 64


@dataclass(frozen=True)
class Topology:
    """Parallel sizes of a launch."""

    tp: int
    cp: int
    dp: int

    @classmethod
    def parse(cls, text: str, ranks: int) -> Topology:
        """From "TPxCP"; data parallelism takes the rest of the ranks."""
        tp, cp = (int(word) for word in text.split("x"))
        if ranks % (tp * cp):
            raise SystemExit(f"{ranks} ranks cannot be cut into TP={tp} and CP={cp}")
        return cls(tp, cp, ranks // (tp * cp))

    def __str__(self) -> str:
        return f"TP={self.tp}, CP={self.cp}, DP={self.dp}"


def build(shape: Shape, topology: Topology, saved: Topology, seed: int, simulated: bool) -> Job:
    """Model, optimizer and scheduler of one rank; `saved` is the topology of the checkpoint."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.optimizer import get_megatron_optimizer

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=topology.tp, context_parallel_size=topology.cp
        )
    seed_everything(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    backend = BACKENDS["hybrid"]
    case = Case(
        backend=backend,
        load_backend=backend,
        layout=Layout(dp=saved.dp, tp=saved.tp),
        load_layout=Layout(dp=topology.dp, tp=topology.tp),
        tied=True,
    )
    model = _build_model(shape, topology, simulated)
    rates = {"lr": LEARNING_RATE, "min_lr": LEARNING_RATE / 10, "weight_decay": 0.01}
    config = optimizer_config({**of_backend(backend), **rates})
    optimizer = get_megatron_optimizer(config, [model])
    seed_everything(seed + 1)
    layout = Layout(dp=topology.dp, tp=topology.tp)
    device = torch.device("cuda", torch.cuda.current_device())
    scheduler = build_scheduler(
        optimizer, LEARNING_RATE, LEARNING_RATE / 10, GLOBAL_BATCH_SIZE, decay_batches=40
    )
    return Job(case, layout, backend, model, optimizer, scheduler, device)


def _build_model(shape: Shape, topology: Topology, simulated: bool) -> Any:
    from megatron.core.models.gpt import GPTModel

    config = _transformer_config(shape, topology, simulated)
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=_block_spec(shape.layers),
        vocab_size=shape.vocabulary,
        max_sequence_length=shape.sequence,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
        rotary_base=1000000,
    )
    device = torch.device("cuda", torch.cuda.current_device())
    return data_parallel(half_precision(gpt, device), overlap_grad_reduce=True)


def _transformer_config(shape: Shape, topology: Topology, simulated: bool) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.width,
        num_attention_heads=shape.heads,
        num_query_groups=shape.query_groups,
        kv_channels=shape.head_size,
        ffn_hidden_size=shape.ffn,
        qk_layernorm=True,
        use_cpu_initialization=simulated,
        tensor_model_parallel_size=topology.tp,
        sequence_parallel=topology.tp > 1,
        context_parallel_size=topology.cp,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
        **plain_gpt(),
    )


def _block_spec(layers: int) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    attention = parts.self_attention.submodules
    attention.q_layernorm = attention.k_layernorm = Norm
    attention.core_attention = GatheringAttention
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=Norm)


class Norm:
    """torch's RMSNorm with the mark by which Megatron sums its gradients over sequence shards."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        norm = torch.nn.RMSNorm(hidden_size, eps=eps)
        norm.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


class GatheringAttention(torch.nn.Module):
    """Causal attention of this rank's queries over the whole sequence."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()
        self.scale = config.kv_channels**-0.5
        self.repeats = config.num_attention_heads // config.num_query_groups

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        """Shapes: query (positions, batch, heads, size), key and value with query groups."""
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

        group = parallel_state.get_context_parallel_group()
        size = group.size()
        mine = local_positions(query.shape[0] * size, size, group.rank()).to(query.device)
        theirs = mine
        if size > 1:
            key = gather_from_sequence_parallel_region(key.contiguous(), group=group)
            value = gather_from_sequence_parallel_region(value.contiguous(), group=group)
            total = key.shape[0]
            theirs = torch.cat([local_positions(total, size, rank) for rank in range(size)])
            theirs = theirs.to(query.device)
        key = key.repeat_interleave(self.repeats, dim=2)
        value = value.repeat_interleave(self.repeats, dim=2)
        scores = torch.einsum("sbhd,tbhd->bhst", query, key).float() * self.scale
        scores = scores.masked_fill(mine[:, None] < theirs[None, :], float("-inf"))
        weights = torch.softmax(scores, dim=-1).to(value.dtype)
        mixed = torch.einsum("bhst,tbhd->sbhd", weights, value)
        return mixed.reshape(*mixed.shape[:2], -1)


def local_positions(sequence: int, size: int, rank: int) -> torch.Tensor:
    """Positions (int64) of a context-parallel rank: Megatron gives it an early and a late piece."""
    pieces = torch.arange(sequence).chunk(2 * size)
    if size == 1:
        return torch.arange(sequence)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])


def train(job: Job, shape: Shape, until: int) -> list[float]:
    """Step until `job.iteration` is `until`; this rank's mean loss of each step."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    losses = []
    while job.iteration < until:
        job.model.zero_grad_buffer()
        job.optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=_batches(job, shape),
            model=[job.model],
            num_microbatches=1,
            seq_length=shape.sequence,
            micro_batch_size=GLOBAL_BATCH_SIZE // job.layout.dp,
            forward_only=False,
        )
        job.optimizer.step()
        job.scheduler.step(increment=GLOBAL_BATCH_SIZE)
        job.iteration += 1
        job.consumed_samples += GLOBAL_BATCH_SIZE
        losses.append(float(reports[0]["loss"]))
    return losses


def _batches(job: Job, shape: Shape) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's samples and positions of the next global batch.

    A sample's tokens follow from its number (the data cursor) and from torch's global generator.
    """
    from megatron.core import parallel_state

    rows = []
    for sample in range(job.consumed_samples, job.consumed_samples + GLOBAL_BATCH_SIZE):
        generator = torch.Generator().manual_seed(sample)
        row = torch.randint(shape.vocabulary, (shape.sequence + 1,), generator=generator)
        rows.append((row + int(torch.randint(7, ()))) % shape.vocabulary)
    size = GLOBAL_BATCH_SIZE // job.layout.dp
    first = parallel_state.get_data_parallel_rank() * size
    tokens = torch.stack(rows[first : first + size])
    context = parallel_state.get_context_parallel_group()
    places = local_positions(shape.sequence, context.size(), context.rank())
    yield {
        "tokens": tokens[:, :-1][:, places].to(job.device),
        "labels": tokens[:, 1:][:, places].to(job.device),
        "positions": places.repeat(size, 1).to(job.device),
    }

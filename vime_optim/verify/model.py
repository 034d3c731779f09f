"""A small Qwen3-shaped GPT from the real megatron-core, with its DDP, optimizer and scheduler.

RMSNorm, SwiGLU, grouped queries, norms on queries and keys, rotary positions, no bias; local layer
specs, so Transformer Engine is not needed. Sizes are chosen so that buckets need padding and
data-parallel borders cut parameters anywhere.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vime_optim.verify.case import Backend, Case, Layout

HIDDEN_SIZE = 40
HEAD_SIZE = 12
NUM_HEADS = 4
NUM_KV_HEADS = 2
FFN_SIZE = 56
EXPERT_FFN_SIZE = 24
NUM_EXPERTS = 4
NUM_LAYERS = 2
VOCAB_SIZE = 96
SEQUENCE_LENGTH = 8
#: Divides by the data-parallel sizes 1, 2, 3, 4, 6 and 12.
GLOBAL_BATCH_SIZE = 12
#: Elements; small enough that the model needs several buckets.
BUCKET_NUMEL = 9000
LR = 2e-2
MIN_LR = 1e-4

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}


@dataclass
class Job:
    """Everything that one rank trains with. `iteration` counts finished steps."""

    case: Case
    layout: Layout
    backend: Backend
    model: Any  # DistributedDataParallel
    optimizer: Any  # DistributedOptimizer or ChainedOptimizer
    scheduler: Any  # OptimizerParamScheduler
    device: torch.device
    iteration: int = 0
    consumed_samples: int = 0

    @property
    def gpt(self) -> Any:
        """The GPTModel inside DDP and Float16Module, whose sharded_state_dict is saved."""
        module = self.model
        while hasattr(module, "module"):
            module = module.module
        return module

    @property
    def same_model_parallel(self) -> bool:
        """Whether this side has the TP and PP of the save: only then do generators come back."""
        saved, here = self.case.layout, self.layout
        return (saved.tp, saved.pp) == (here.tp, here.pp)

    def seed_anew(self) -> None:
        """What a load in other sizes does instead, the same on every rank."""
        seed_everything(self.case.seed + 1000 + self.iteration)


class Builder:
    """Builds what one side of a case trains with; tests override what they have beyond it."""

    def __init__(self, case: Case, *, loading: bool) -> None:
        self.case = case
        self.loading = loading
        self.layout = case.load_layout if loading else case.layout
        self.backend = case.load_backend if loading else case.backend

    def prepare(self) -> None:
        """On the simulated device, put the stand-in for FusedAdam in place, or take it away."""
        from vime_optim.simulate import device, megatron

        if device.is_enabled():
            megatron.prepare("torch" if self.backend.optimizer == "torch" else "te")

    def build(self) -> Job:
        """Initialize model parallelism and build model, optimizer and scheduler."""
        from megatron.core import parallel_state, tensor_parallel

        layout, seed = self.layout, self.case.seed + (77 if self.loading else 0)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            expert_model_parallel_size=layout.ep,
        )
        seed_everything(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        device = torch.device("cuda", torch.cuda.current_device())
        model = self._build_model(device)
        optimizer = self.build_optimizer(model)
        # Stages of a pipeline draw different amounts while they build; all go on alike from here.
        seed_everything(seed + 1)
        scheduler = build_scheduler(optimizer, LR, MIN_LR, GLOBAL_BATCH_SIZE, decay_batches=20)
        return Job(self.case, layout, self.backend, model, optimizer, scheduler, device)

    def _build_model(self, device: torch.device) -> Any:
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel
        from megatron.core.transformer.transformer_config import TransformerConfig

        from vime_optim.simulate.megatron import complete_router

        complete_router()
        config = TransformerConfig(**self.model_config())
        gpt = GPTModel(
            config=config,
            transformer_layer_spec=self.layer_spec(config),
            vocab_size=VOCAB_SIZE,
            max_sequence_length=SEQUENCE_LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=self.case.tied,
            position_embedding_type="rope",
            rotary_percent=1.0,
        )
        model = half_precision(gpt, device)
        self.change_parameters(gpt)
        return data_parallel(model, overlap_grad_reduce=True, bucket_size=self.bucket_numel())

    def model_config(self) -> dict[str, Any]:
        """Arguments of Megatron's TransformerConfig."""
        values: dict[str, Any] = {
            **plain_gpt(),
            "normalization": _normalization(),
            "num_layers": NUM_LAYERS,
            "hidden_size": HIDDEN_SIZE,
            "num_attention_heads": NUM_HEADS,
            "num_query_groups": NUM_KV_HEADS,
            "kv_channels": HEAD_SIZE,
            "ffn_hidden_size": FFN_SIZE,
            "qk_layernorm": True,
            "use_cpu_initialization": True,
            "tensor_model_parallel_size": self.layout.tp,
            "pipeline_model_parallel_size": self.layout.pp,
            "expert_model_parallel_size": self.layout.ep,
        }
        if self.case.moe != "none":
            values |= {
                "num_moe_experts": NUM_EXPERTS,
                "moe_router_topk": 2,
                "moe_ffn_hidden_size": EXPERT_FFN_SIZE,
                "moe_token_dispatcher_type": "alltoall",
                "moe_aux_loss_coeff": 1e-2,
            }
        return values

    def layer_spec(self, config: Any) -> Any:
        """For a TransformerConfig."""
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

        return get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts,
            qk_layernorm=config.qk_layernorm,
            normalization=config.normalization,
        )

    def change_parameters(self, gpt: Any) -> None:
        """Called with the model before DDP lays its parameters into buckets."""

    def bucket_numel(self) -> int | None:
        return None if self.case.one_bucket else BUCKET_NUMEL

    def build_optimizer(self, model: Any) -> Any:
        from megatron.core.optimizer import get_megatron_optimizer

        return get_megatron_optimizer(optimizer_config(self.optimizer_values()), [model])

    def optimizer_values(self) -> dict[str, Any]:
        """Arguments of Megatron's OptimizerConfig."""
        return {
            **of_backend(self.backend),
            "lr": LR,
            "min_lr": MIN_LR,
            "weight_decay": 0.05,
            "clip_grad": 1.0,
        }


def seed_everything(seed: int) -> None:
    """Seed python's, numpy's and torch's CPU generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def plain_gpt() -> dict[str, Any]:
    """Arguments of TransformerConfig: bfloat16, SwiGLU, no bias, nothing fused."""
    return {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
    }


def _normalization() -> str:
    """RMSNorm; LayerNorm where Megatron takes norms from Apex, which has no other."""
    from megatron.core.transformer import transformer_block

    fused = getattr(transformer_block.LayerNormImpl, "__name__", "") == "FusedLayerNorm"
    return "LayerNorm" if fused else "RMSNorm"


def half_precision(gpt: Any, device: torch.device) -> Any:
    """A GPTModel on a device, in Megatron's Float16Module."""
    from megatron.core.transformer.module import Float16Module

    for tensor in (*gpt.parameters(), *gpt.buffers()):
        tensor.data = tensor.data.to(device)
    return Float16Module(gpt.config, gpt)


def data_parallel(model: Any, **options: Any) -> Any:
    """A Float16Module in Megatron's DDP, set up as its schedule expects."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True, **options
    )
    ddp = DistributedDataParallel(model.config, ddp_config, model)
    model.config.no_sync_func = ddp.no_sync
    model.config.finalize_model_grads_func = finalize_model_grads
    return ddp


def of_backend(backend: Backend) -> dict[str, Any]:
    """Arguments of OptimizerConfig that a backend decides."""
    values = {
        "optimizer": "adam",
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "use_distributed_optimizer": True,
        "use_precision_aware_optimizer": backend.pao,
        "store_param_remainders": backend.remainders,
        "exp_avg_dtype": DTYPES[backend.exp_avg_dtype],
        "exp_avg_sq_dtype": DTYPES[backend.exp_avg_sq_dtype],
    }
    if backend.optimizer == "hybrid":
        values |= {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": backend.offload_fraction,
            "overlap_cpu_optimizer_d2h_h2d": True,
        }
    return values


def optimizer_config(values: dict[str, Any]) -> Any:
    """Megatron's OptimizerConfig; arguments that this release does not know are left out."""
    from megatron.core.optimizer import OptimizerConfig

    known = {field.name for field in dataclasses.fields(OptimizerConfig)}
    return OptimizerConfig(**{name: value for name, value in values.items() if name in known})


def build_scheduler(
    optimizer: Any, lr: float, min_lr: float, batch_size: int, decay_batches: int
) -> Any:
    """Two batches of warm-up; a batch is a step, and Megatron's scheduler counts samples."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=lr,
        min_lr=min_lr,
        lr_warmup_steps=2 * batch_size,
        lr_decay_steps=decay_batches * batch_size,
        lr_decay_style="cosine",
        start_wd=0.05,
        end_wd=0.1,
        wd_incr_steps=decay_batches * batch_size,
        wd_incr_style="linear",
    )

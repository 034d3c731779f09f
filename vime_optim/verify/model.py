"""A small Qwen3-shaped GPT from the real megatron-core, with its DDP, optimizer and scheduler.

RMSNorm, SwiGLU, grouped queries, norms on queries and keys, rotary positions, no bias; local layer
specs, so Transformer Engine is not needed. Sizes are chosen so that buckets need padding and
data-parallel borders cut parameters anywhere.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vime_optim.verify.case import Backend, Case, Layout
from vime_optim.verify.model_optimizer import build_optimizer

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


def build(case: Case, layout: Layout, backend: Backend, seed: int, *, loading: bool = False) -> Job:
    """Initialize model parallelism and build model, optimizer and scheduler for one side."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
    )
    seed_everything(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    device = torch.device("cuda", torch.cuda.current_device())
    model = _build_model(case, layout, device)
    optimizer = build_optimizer(case, backend, model, loading=loading)
    if case.fp16:
        model.config.grad_scale_func = optimizer.scale_loss
    # Stages of a pipeline draw different amounts while they build; all continue alike from here.
    seed_everything(seed + 1)
    job = Job(case, layout, backend, model, optimizer, _build_scheduler(optimizer), device)
    return job


def seed_everything(seed: int) -> None:
    """Seed python's, numpy's and torch's CPU generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def _build_model(case: Case, layout: Layout, device: torch.device) -> Any:
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.module import Float16Module

    config = _transformer_config(case, layout)
    if case.moe != "none":
        _allow_moe_without_te()
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=_layer_spec(case, config),
        vocab_size=VOCAB_SIZE,
        max_sequence_length=SEQUENCE_LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=case.tied,
        position_embedding_type="rope",
        rotary_percent=1.0,
    )
    for parameter in gpt.parameters():
        parameter.data = parameter.data.to(device)
    for buffer in gpt.buffers():
        buffer.data = buffer.data.to(device)
    model = Float16Module(config, gpt)
    if case.fp32_norm:
        _keep_input_norms_in_fp32(gpt)
    _freeze(case, gpt)
    ddp = DistributedDataParallel(
        config=config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            bucket_size=None if case.one_bucket else case.bucket_numel or BUCKET_NUMEL,
        ),
        module=model,
    )
    config.no_sync_func = ddp.no_sync
    config.finalize_model_grads_func = finalize_model_grads
    return ddp


def _transformer_config(case: Case, layout: Layout) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    moe: dict[str, Any] = {}
    if case.moe != "none":
        moe = {
            "num_moe_experts": NUM_EXPERTS,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": EXPERT_FFN_SIZE,
            "moe_token_dispatcher_type": "alltoall",
            "moe_aux_loss_coeff": 1e-2,
            "moe_grouped_gemm": case.moe == "grouped",
        }
    if case.moe_layers != "all":
        where = 0 if case.moe_layers == "first" else NUM_LAYERS - 1
        moe["moe_layer_freq"] = [int(layer == where) for layer in range(NUM_LAYERS)]
    return TransformerConfig(
        num_layers=NUM_LAYERS,
        hidden_size=HIDDEN_SIZE,
        num_attention_heads=NUM_HEADS,
        num_query_groups=NUM_KV_HEADS,
        kv_channels=HEAD_SIZE,
        ffn_hidden_size=FFN_SIZE,
        normalization=_normalization(),
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        qk_layernorm=case.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        fp16=case.fp16,
        bf16=not case.fp16,
        params_dtype=torch.float16 if case.fp16 else torch.bfloat16,
        pipeline_dtype=torch.float16 if case.fp16 else torch.bfloat16,
        use_cpu_initialization=True,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        **moe,
    )


def _layer_spec(case: Case, config: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
    )

    if case.moe_layers != "all":
        return get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=config.normalization
        )
    return get_gpt_layer_local_spec(
        num_experts=None if case.moe == "none" else NUM_EXPERTS,
        moe_grouped_gemm=case.moe == "grouped",
        qk_layernorm=case.qk_norm,
        normalization=config.normalization,
    )


def _normalization() -> str:
    """RMSNorm; LayerNorm where Megatron takes norms from Apex, which has no other."""
    from megatron.core.transformer import transformer_block

    fused = getattr(transformer_block.LayerNormImpl, "__name__", "") == "FusedLayerNorm"
    return "LayerNorm" if fused else "RMSNorm"


def _allow_moe_without_te() -> None:
    """megatron-core 0.16 and 0.17 read this name in their router, and define it only with TE."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _freeze(case: Case, gpt: Any) -> None:
    for name, parameter in gpt.named_parameters():
        if case.trained != "all":
            parameter.requires_grad_((".experts." in name) == (case.trained == "experts"))


def _keep_input_norms_in_fp32(gpt: Any) -> None:
    """Make the input norms fp32, as routers and some norms are in real models.

    All of them: layers are stacked under one checkpoint key, which has one dtype.
    """
    for layer in gpt.decoder.layers:
        norm = layer.input_layernorm
        norm.weight.data = norm.weight.data.float()
        norm.forward = _in_fp32(norm.forward)


def _in_fp32(plain: Any) -> Any:
    def forward(x: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        result: torch.Tensor = plain(x.float(), *rest, **named)
        return result.to(x.dtype)

    return forward


def _build_scheduler(optimizer: Any) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=2e-2,
        min_lr=1e-4,
        lr_warmup_steps=2 * GLOBAL_BATCH_SIZE,
        lr_decay_steps=20 * GLOBAL_BATCH_SIZE,
        lr_decay_style="cosine",
        start_wd=0.05,
        end_wd=0.1,
        wd_incr_steps=20 * GLOBAL_BATCH_SIZE,
        wd_incr_style="linear",
    )

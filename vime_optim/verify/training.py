"""Saves and loads a job through megatron.training.checkpointing, which wheels hold since 0.17.

Nothing is passed that a training script's own arguments would not say; what the fixes change, they
must change below these functions.
"""

from __future__ import annotations

import argparse
import importlib
import typing
from pathlib import Path
from typing import Any

import torch

from vime_optim.errors import VerifyError
from vime_optim.verify import model as sizes
from vime_optim.verify.capture import is_rng_state, rng_state
from vime_optim.verify.model import Job


def save(job: Job, directory: Path) -> None:
    """`save_checkpoint` of the job's state after `job.iteration` steps."""
    checkpointing = _module()
    _set_arguments(job, directory, None)
    checkpointing.save_checkpoint(
        job.iteration, [job.model], job.optimizer, job.scheduler, 0, checkpointing_context={}
    )


def load(job: Job, directory: Path, iteration: int) -> dict[str, Any]:
    """`load_checkpoint` into a fresh job; same result as `checkpoint.load`."""
    checkpointing = _module()
    arguments = _set_arguments(job, directory, iteration)
    before = rng_state()
    untouched = True

    load_optimizer = job.optimizer.load_state_dict

    def watch(state: Any) -> None:
        nonlocal untouched
        load_optimizer(state)
        untouched = is_rng_state(before)

    job.optimizer.load_state_dict = watch
    try:
        loaded, _ = checkpointing.load_checkpoint(
            [job.model], job.optimizer, job.scheduler, strict=True, checkpointing_context={}
        )
    finally:
        del job.optimizer.load_state_dict
    job.iteration = loaded
    job.consumed_samples = arguments.consumed_train_samples
    if not job.same_model_parallel:
        job.seed_anew()
    return {"rng_untouched": untouched}


def _module() -> Any:
    if not hasattr(typing, "override"):  # megatron.training 0.19 is written for Python 3.12
        import typing_extensions

        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    try:
        return importlib.import_module("megatron.training.checkpointing")
    except ModuleNotFoundError as error:
        raise VerifyError(
            "megatron.training cannot be imported",
            got=f"no module named {error.name}",
            next_step="it is in the wheels of megatron-core 0.17 and newer, and needs PyYAML",
        ) from None


def _set_arguments(job: Job, directory: Path, iteration: int | None) -> argparse.Namespace:
    """What Megatron's argument parser would hold for this job."""
    from megatron.core import num_microbatches_calculator as microbatches
    from megatron.training import global_vars

    layout, case, backend = job.layout, job.case, job.backend
    micro_batch_size = sizes.GLOBAL_BATCH_SIZE // layout.dp
    arguments = argparse.Namespace(
        save=str(directory),
        load=str(directory),
        ckpt_step=iteration,
        consumed_train_samples=job.consumed_samples,
        no_load_optim=case.model_only,
        dist_ckpt_optim_fully_reshardable=case.sharding == "fully_reshardable",
        use_precision_aware_optimizer=backend.pao,
        optimizer_cpu_offload=backend.optimizer == "hybrid",
        optimizer_offload_fraction=backend.offload_fraction,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        data_parallel_size=layout.dp,
        world_size=layout.world_size,
        micro_batch_size=micro_batch_size,
        **_FIXED_ARGUMENTS,
    )
    microbatches.unset_num_microbatches_calculator()
    microbatches.init_num_microbatches_calculator(
        torch.distributed.get_rank(), None, sizes.GLOBAL_BATCH_SIZE, micro_batch_size, layout.dp
    )
    global_vars.set_args(arguments)
    return arguments


#: Megatron's own defaults, for what save_checkpoint and load_checkpoint read.
_ON = """use_distributed_optimizer use_dist_ckpt exit_on_missing_checkpoint ckpt_fully_parallel_save
    ckpt_load_validate_sharding_integrity bf16"""
_OFF = """add_position_embedding fp16 auto_detect_ckpt_format finetune no_load_rng no_save_rng
    no_save_optim load_main_params_from_ckpt ckpt_convert_update_legacy_dist_opt_format
    ckpt_assume_constant_structure ckpt_fully_parallel_load
    distrib_optim_fully_reshardable_mem_efficient stream_ckpt_dequant verify_integrity enable_msc
    async_save use_persistent_ckpt_worker log_progress data_parallel_random_init enable_ft_package
    use_megatron_fsdp use_torch_fsdp2 one_logger_async"""
_NONE = """vocab_file virtual_pipeline_model_parallel_size pretrained_checkpoint
    override_ckpt_iteration ckpt_convert_format non_persistent_save_interval
    non_persistent_ckpt_type non_persistent_global_ckpt_dir phase_transition_iterations
    export_kd_teacher_load export_kd_teacher_ckpt_format save_retain_interval dataloader_save"""
_FIXED_ARGUMENTS: dict[str, Any] = {
    **dict.fromkeys(_ON.split(), True),
    **dict.fromkeys(_OFF.split(), False),
    **dict.fromkeys(_NONE.split()),
    "rank": 0,
    "num_layers": sizes.NUM_LAYERS,
    "hidden_size": sizes.HIDDEN_SIZE,
    "num_attention_heads": sizes.NUM_HEADS,
    "global_batch_size": sizes.GLOBAL_BATCH_SIZE,
    "padded_vocab_size": sizes.VOCAB_SIZE,
    "max_position_embeddings": sizes.SEQUENCE_LENGTH,
    "tokenizer_type": "NullTokenizer",
    "optimizer": "adam",
    "ckpt_format": "torch_dist",
    "ckpt_fully_parallel_save_process_group": "dp",
    "ckpt_fully_parallel_load_exchange_algo": "broadcast",
    "ckpt_fully_parallel_load_process_group": "dp",
    "dist_ckpt_strictness": "assume_ok_unexpected",
    "dist_ckpt_workers": 1,
    "async_strategy": "mcore",
    "async_ckpt_cpu_priority": 10,
    "async_ckpt_io_priority": 3,
    "non_persistent_local_ckpt_algo": "fully_parallel",
    "skipped_train_samples": 0,
    "consumed_valid_samples": 0,
}

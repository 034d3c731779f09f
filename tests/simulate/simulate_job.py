"""One rank of the job in test_simulate.py: a tiny GPT on the simulated device, stock megatron-core.

For each case: 3 steps, save in both formats, 2 more steps; then for each format a fresh job with
another seed loads, does the same 2 steps, and is compared bit by bit.

    python simulate_job.py RANK WORLD RENDEZVOUS_FILE FOLDER CASES_JSON
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

FORMATS = ("dp_reshardable", "fully_reshardable")


def build(case: dict[str, Any], seed: int) -> tuple[Any, Any]:
    """(DDP-wrapped model, megatron optimizer) of a case."""
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from vime_optim.simulate.megatron import prepare

    prepare(case["adam"])
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=64,
        gated_linear_unit=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
    )
    gpt = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=64,
        max_sequence_length=8,
        share_embeddings_and_output_weights=case.get("tied", False),
    )
    overlap = case.get("overlap", False)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=case.get("fp32_grads", True),
        average_in_collective=case.get("average", False),
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        bucket_size=4000 if overlap else None,
    )
    model = DistributedDataParallel(config, ddp, Float16Module(config, gpt.cuda()))
    options = dict(case.get("optimizer", {}))
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype"):
        if name in options:
            options[name] = getattr(torch, options[name])
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            weight_decay=0.01,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            overlap_param_gather=overlap,
            **options,
        ),
        [model],
    )
    return model, optimizer


def train(model: Any, optimizer: Any, first: int, last: int) -> list[float]:
    """Steps first..last-1; the gradient norms."""
    import torch
    from megatron.core.distributed import finalize_model_grads

    norms = []
    for step in range(first, last):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + int(torch.distributed.get_rank()))
        tokens = torch.randint(0, 64, (2, 8), generator=generator).cuda()
        positions = torch.arange(8, device="cuda").expand(2, 8)
        mask = torch.ones(8, 8, dtype=torch.bool, device="cuda").triu(1)[None, None]
        model(tokens, positions, mask, labels=tokens.roll(-1, 1)).float().mean().backward()
        finalize_model_grads([model])
        updated, norm, _ = optimizer.step()
        assert updated
        norms.append(float(norm))
    return norms


def capture(model: Any, optimizer: Any) -> dict[str, Any]:
    """Copies of all weights and optimizer states, and the group's steps."""
    import torch

    found = {f"model.{name}": value for name, value in model.named_parameters()}
    for chained in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = chained.optimizer
        for i, group in enumerate(inner.param_groups):
            for j, param in enumerate(group["params"]):
                found[f"{i}.{j}"] = param
                found.update({f"{i}.{j}.{k}": v for k, v in inner.state[param].items()})
    return {
        name: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
        for name, value in found.items()
    }


def difference(wanted: dict[str, Any], got: dict[str, Any]) -> str:
    import torch

    from vime_optim.tools.bits import same_bits

    names = sorted(wanted.keys() ^ got.keys())
    names += [
        name
        for name, value in wanted.items()
        if name in got
        and not (
            same_bits(value, got[name]) if isinstance(value, torch.Tensor) else value == got[name]
        )
    ]
    return f"differs: {len(names)} of {len(wanted)}, {names[:2]}" if names else "exact"


def template(model: Any, optimizer: Any, kind: str, is_loading: bool) -> dict[str, Any]:
    metadata = {"distrib_optim_sharding_type": kind, "chained_optim_avoid_prefix": True}
    weights = model.module.module.sharded_state_dict(metadata=metadata)
    state = optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=metadata)
    return {"model": weights, "optimizer": state}


def attempt(outcome: dict[str, str], kind: str, action: str, work: Any) -> Any:
    """Runs `work`; an exception becomes the outcome of this format."""
    import torch

    result = None
    if kind not in outcome:
        try:
            result = work()
        except Exception as error:
            outcome[kind] = f"{action}: {type(error).__name__}: {str(error)[:80]}"
    torch.distributed.barrier()
    return result


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    import torch
    from megatron.core import __version__, dist_checkpointing

    outcome: dict[str, Any] = {"version": __version__}
    model, optimizer = build(case, 1)
    outcome["norms"] = train(model, optimizer, 0, 3)
    for kind in FORMATS:
        (folder / kind).mkdir(parents=True, exist_ok=True)

        def save(kind: str = kind) -> None:
            state = template(model, optimizer, kind, is_loading=False)
            dist_checkpointing.save(state, str(folder / kind))

        attempt(outcome, kind, "save", save)
    train(model, optimizer, 3, 5)
    wanted = capture(model, optimizer)
    for kind in FORMATS:

        def load(kind: str = kind) -> dict[str, Any]:
            fresh, restored = build(case, 7)
            state = template(fresh, restored, kind, is_loading=True)
            loaded = dist_checkpointing.load(state, str(folder / kind))
            fresh.module.module.load_state_dict(loaded["model"])
            restored.load_state_dict(loaded["optimizer"])
            train(fresh, restored, 3, 5)
            return capture(fresh, restored)

        got = attempt(outcome, kind, "load", load)
        if got is not None:
            outcome[kind] = difference(wanted, got)
    if case.get("async"):
        outcome["async"] = saved_asynchronously(folder / "async")
    assert torch.cuda.memory_allocated() > 0
    return outcome


def saved_asynchronously(folder: Path) -> dict[str, list[float]]:
    """First and later value that a persistent worker saved of device and host memory (F19)."""
    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    tensors = {"device": torch.ones(4096, device="cuda"), "host": torch.ones(4096)}

    def sharded() -> dict[str, Any]:
        offset = (0, rank, world)
        return {k: ShardedTensor.from_rank_offsets(k, v, offset) for k, v in tensors.items()}

    folder.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    options: dict[str, Any] = {}
    if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
        options["async_strategy"] = "mcore"
    request = dist_checkpointing.save(sharded(), str(folder), async_sharded_save=True, **options)
    queue = AsyncCallsQueue(persistent=True)
    queue.schedule_async_request(request)
    for value in tensors.values():
        value.add_(1)  # the next optimizer step, which comes before the worker writes
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    loaded = dist_checkpointing.load(sharded(), str(folder))
    return {name: [float(value.min()), float(value.max())] for name, value in loaded.items()}


def main() -> None:
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    from vime_optim.simulate.megatron import prepare

    prepare("torch")
    import torch
    from megatron.core import parallel_state

    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{sys.argv[3]}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=120),
    )
    parallel_state.initialize_model_parallel()
    folder = Path(sys.argv[4])
    outcomes = {}
    for name, case in json.loads(sys.argv[5]).items():
        outcomes[name] = run_case(case, folder / name)
        (folder / f"rank{rank}.json").write_text(json.dumps(outcomes))
    torch.distributed.barrier()


if __name__ == "__main__":
    main()

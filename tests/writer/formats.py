"""Which format a save takes, what a template may be, and what stays of a loaded state dict.

One model of stacked layers: the weights of four layers are parts of one checkpoint tensor.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path
from typing import Any

import torch

from tests.writer.scenarios import gathered, install_writer_fixes, rank
from vime_optim.tools.bits import same_bits

LAYERS, ROWS, COLUMNS = 4, 24, 16


class _Stack(torch.nn.Module):
    def __init__(self, layers: list[int], frozen: list[int], extra: bool) -> None:
        super().__init__()
        for layer in layers:
            generator = torch.Generator().manual_seed(layer)
            value = torch.randn(ROWS, COLUMNS, generator=generator).to(torch.bfloat16).to("cuda")
            parameter = torch.nn.Parameter(value, requires_grad=layer not in frozen)
            self.register_parameter(f"layer{layer}", parameter)
        if extra:
            self.register_parameter("extra", torch.nn.Parameter(torch.ones_like(value)))


class Job:
    """A model of stacked layers and its optimizer. `layers` are those of this rank's stage."""

    def __init__(
        self,
        frozen: list[int] = (),  # type: ignore[assignment]
        *,
        pipeline: bool = False,
        offload: bool = True,
        extra: bool = False,
    ) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.transformer_config import TransformerConfig

        install_writer_fixes()
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        stages = torch.distributed.get_world_size() if pipeline else 1
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages)
        per_stage = LAYERS // stages
        first = per_stage * rank() if pipeline else 0
        self.layers = list(range(first, first + per_stage))
        config = TransformerConfig(
            num_layers=LAYERS, hidden_size=8, num_attention_heads=1, bf16=True,
            pipeline_model_parallel_size=stages, pipeline_dtype=torch.bfloat16,
        )  # fmt: skip
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, bucket_size=None
        )
        stack = _Stack(self.layers, list(frozen), extra)
        self.model = DistributedDataParallel(config, ddp, stack)
        values = {
            "optimizer": "adam", "lr": 0.01, "bf16": True, "params_dtype": torch.bfloat16,
            "use_distributed_optimizer": True, "use_precision_aware_optimizer": True,
            "optimizer_cpu_offload": offload, "optimizer_offload_fraction": 1.0, "clip_grad": 0.0,
        }  # fmt: skip
        self.optimizer = get_megatron_optimizer(OptimizerConfig(**values), [self.model])
        self.iteration = 0
        self.train(1)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.iteration += 1
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            for number, parameter in enumerate(self.model.parameters()):
                if parameter.requires_grad:
                    parameter.main_grad.fill_(0.01 * (1 + number) * self.iteration)
            self.model.finish_grad_sync()
            self.optimizer.step()

    @property
    def has_optimizer(self) -> bool:
        return not self.optimizer.is_stub_optimizer

    def state(self, sharding: str | None, is_loading: bool = False) -> dict[str, Any]:
        from megatron.core import parallel_state
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        replica = (0, 0, parallel_state.get_data_parallel_rank())
        model = {}
        for name, parameter in self.model.module.named_parameters():
            stacked = name.startswith("layer")
            model[name] = ShardedTensor.from_rank_offsets(
                "layers.weight" if stacked else name,
                parameter,
                *([(0, int(name.removeprefix("layer")), LAYERS)] if stacked else []),
                replica_id=replica,
                prepend_axis_num=int(stacked),
            )
        state: dict[str, Any] = {"iteration": self.iteration, "model": model}
        if self.has_optimizer:
            metadata = {"distrib_optim_sharding_type": sharding} if sharding else None
            options = {"is_loading": True} if is_loading else {}
            state["optimizer"] = self.optimizer.sharded_state_dict(
                model, **options, metadata=metadata
            )
        return state

    def save(self, folder: Path, sharding: str | None) -> None:
        from megatron.core import dist_checkpointing

        if rank() == 0:
            folder.mkdir(parents=True)
        torch.distributed.barrier()
        content = {"distrib_optim_sharding_type": sharding} if sharding else None
        dist_checkpointing.save(self.state(sharding), str(folder), content_metadata=content)

    def load(self, folder: Path, template: dict[str, Any]) -> dict[str, Any]:
        from megatron.core import dist_checkpointing

        loaded: dict[str, Any] = dist_checkpointing.load(template, str(folder))
        self.take(loaded)
        return loaded

    def take(self, loaded: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, parameter in self.model.module.named_parameters():
                parameter.copy_(loaded["model"][name])
        if self.has_optimizer:
            self.optimizer.load_state_dict(loaded["optimizer"])
        self.iteration = loaded["iteration"]

    def bits(self) -> dict[str, torch.Tensor]:
        """Parameters, and masters, moments and steps of this rank's shards."""
        from vime_optim.optimizer.kinds import owned_params, param_name
        from vime_optim.optimizer.slots import slots_of
        from vime_optim.optimizer.steps import read_step

        found = {name: p.detach().cpu().clone() for name, p in self.model.named_parameters()}
        members = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        for member in members if self.has_optimizer else []:
            for parameter, _ in owned_params(member):
                for name, slot in slots_of(member, parameter).items():
                    key = f"{param_name(member, parameter)} {name}"
                    found[key] = slot.read().cpu().clone()
            found["step"] = torch.tensor(read_step(member.optimizer) or 0)
        return found


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(same_bits(a[key], b[key]) for key in a)


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def frozen(root: str) -> dict[str, Any]:
    """Layers 1 and 2 frozen; in the pipeline, all of the first stage."""
    import vime_optim.fixes.sharding as sharding

    outcomes = {}
    heard = _Warnings()
    logging.getLogger("vime_optim").addHandler(heard)
    for name, options, asked in (
        ("default", {"frozen": [1, 2]}, None),
        ("fully", {"frozen": [1, 2]}, "fully_reshardable"),
        ("dp", {"frozen": [1, 2]}, "dp_reshardable"),
        ("last", {"frozen": [0]}, None),
        ("pipeline", {"frozen": [0, 1], "pipeline": True}, None),
        ("pipeline-named", {"frozen": [0, 1], "pipeline": True}, "dp_reshardable"),
        ("whole", {}, None),
    ):
        heard.texts.clear()
        folder = Path(root) / name
        job = Job(**options)
        job.train(2)
        job.save(folder, asked)
        job.save(folder.with_name(name + "2"), asked)  # the type is known from the start now
        expected = job.bits()
        job.train(2)
        uninterrupted = job.bits()
        other = Job(**options)
        other.load(folder, other.state(asked, is_loading=True))
        loaded = other.bits()
        other.train(2)
        outcome = {
            "resumed": _same(expected, loaded),
            "went on": _same(uninterrupted, other.bits()),
            "type": sharding._type_of_checkpoint(str(folder)),
            "second": sharding._type_of_checkpoint(str(folder) + "2"),
            "warned": [t for t in heard.texts if "not fully_reshardable:" in t],
        }
        outcomes[name] = gathered(outcome)
    logging.getLogger("vime_optim").removeHandler(heard)
    outcomes["refused"] = gathered(_refused(Path(root) / "refused"))
    return outcomes


def _refused(folder: Path) -> dict[str, Any]:
    """VIME_OPTIM_SHARDING=off: the type that was asked for, or none."""
    from vime_optim import settings

    usual = settings.current()
    settings.activate(dataclasses.replace(usual, sharding="off"))
    text = ""
    try:
        Job([1]).save(folder, "fully_reshardable")
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    finally:
        settings.activate(usual)
    torch.distributed.barrier()
    return {"text": text, "files": sorted(os.listdir(folder))}


def templates(root: str) -> dict[str, Any]:
    """What a load may be given, and what becomes of what it gave."""
    outcomes = {}
    for offload in (True, False):  # torch's Adam on the host; FusedAdam, whose states are coded
        job = Job(offload=offload)
        job.train(1)
        folder = Path(root) / f"offload{offload}"
        job.save(folder, None)
        expected = job.bits()
        job.train(1)
        found = {}
        kept = job.load(folder, job.state(None))
        found["built without is_loading"] = _same(expected, job.bits())
        job.take(kept)
        found["taken twice"] = _same(expected, job.bits())
        job.train(2)
        found["trained on"] = not _same(expected, job.bits())
        if offload:
            job.take({**kept, "model": job.load(folder, job.state(None))["model"]})
            found["taken after training"] = _same(expected, job.bits())
            job.train(1)
            apart = {key: {**value} for key, value in job.state(None)["optimizer"].items()
                     if isinstance(value, dict)}  # fmt: skip
            state = job.state(None)
            state["optimizer"] = {**state["optimizer"], **apart}
        else:
            state = job.state(None)
            state["optimizer"] = {**state["optimizer"]}
        job.load(folder, state)
        found["a copied dict"] = _same(expected, job.bits())
        template = job.state(None, is_loading=True)
        job.load(folder, template)
        job.train(1)
        job.load(folder, template)
        found["one template, two loads"] = _same(expected, job.bits())
        outcomes[str(offload)] = gathered(found)
    return outcomes


def partial(root: str) -> dict[str, Any]:
    """A planner that allows a partial load: slime's critic has a parameter that its actor lacks."""
    from megatron.core.dist_checkpointing.strategies import torch as strategies

    outcomes: dict[str, Any] = {}
    planner = strategies.MCoreLoadPlanner
    stock = planner.__init__, planner._validate_global_shapes
    set_up = planner.set_up_planner
    for offload in (True, False):
        folder = Path(root) / f"offload{offload}"
        actor = Job(offload=offload)
        actor.save(folder, None)
        critic = Job(offload=offload, extra=True)
        before = critic.bits()
        found: dict[str, Any] = {"not allowed": _error(critic, folder)}
        planner.__init__ = _allowing(stock[0])
        planner._validate_global_shapes = lambda *args, **kwargs: None
        try:
            critic.load(folder, critic.state(None, is_loading=True))
            after = critic.bits()
            new = [key for key in after if "extra" in key]
            found["states"] = len(new) - 1  # the other rank may hold all of them
            found["kept"] = _same(
                {key: before[key] for key in new}, {key: after[key] for key in new}
            )
            critic.train(1)
            planner.set_up_planner = _lacking_a_chunk(set_up)
            found["in part"] = _error(critic, folder)
        finally:
            planner.__init__, planner._validate_global_shapes = stock
            planner.set_up_planner = set_up
        outcomes[str(offload)] = gathered(found)
    return outcomes


def _allowing(original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**kwargs, "allow_partial_load": True})

    return __init__


def _error(job: Job, folder: Path) -> str:
    try:
        job.load(folder, job.state(None, is_loading=True))
    except BaseException as error:  # torch's CheckpointException is no Exception
        return f"{type(error).__name__}: {error}"
    return ""


def _lacking_a_chunk(original: Any) -> Any:
    """The checkpoint's metadata without one chunk of an optimizer state."""

    def set_up_planner(self: Any, state_dict: Any, metadata: Any, *args: Any, **kw: Any) -> Any:
        stored = metadata.state_dict_metadata["optimizer.state.exp_avg.layers.weight"]
        stored.chunks = [chunk for chunk in stored.chunks if any(chunk.offsets)]
        return original(self, state_dict, metadata, *args, **kw)

    return set_up_planner

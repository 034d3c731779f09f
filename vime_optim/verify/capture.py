"""Reads the whole training state of a rank, straight from the innermost objects.

The optimizer's tensors are read from the AdamW and FusedAdam objects that own them, by Megatron's
own lists of parameters. Nothing of vime_optim's layout code is used, so a fault there cannot hide.

A capture is plain data that `torch.load(weights_only=True)` reads: `pieces` (flat parts of local
parameters by kind), `scalars`, `kinds`, `rng`, `memory`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vime_optim.simulate.fused_adam import master_from_remainder
from vime_optim.verify.model import Job

#: Values of a param group that belong to training; "step" is read where it counts, see below.
GROUP_KEYS = ("lr", "weight_decay", "betas", "eps", "lr_mult", "wd_mult", "max_lr", "min_lr")


@dataclass(frozen=True)
class ParameterState:
    """What the inner optimizer holds for this rank's part [start, end) of one model parameter.

    `leaf` is the tensor in the innermost optimizer's (`owner`'s) groups, `outer_leaf` the one in
    the groups that Megatron sees; they differ under HybridDeviceOptimizer alone. `stored` are the
    state's own tensors, `tensors` those of them that are moments.
    """

    model_parameter: Any  # a tensor with Megatron's `main_grad`
    start: int
    end: int
    master: torch.Tensor
    tensors: dict[str, torch.Tensor]
    scales: dict[str, torch.Tensor]
    step: float | None
    group: dict[str, Any]
    stored: dict[str, torch.Tensor]
    owner: Any
    leaf: torch.Tensor
    outer_leaf: torch.Tensor


def capture(job: Job, path: Path) -> dict[str, Any]:
    """Write this rank's capture to `path`; returns its `memory` part.

    All tensors are copied to the CPU as they are: same dtype, same bits.
    """
    states = list(parameter_states(job.optimizer))
    memory = memory_use(states)
    record = {
        "pieces": list(_pieces(job, states)),
        "scalars": _job_scalars(job),
        "kinds": _kinds(states),
        "rng": rng_state(),
        "memory": memory,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(record, path)
    return memory


def chained(optimizer: Any) -> list[Any]:
    """The DistributedOptimizers with parameters behind a possible ChainedOptimizer."""
    members = getattr(optimizer, "chained_optimizers", [optimizer])
    return [member for member in members if not getattr(member, "is_stub_optimizer", False)]


def parameter_states(optimizer: Any) -> Iterator[ParameterState]:
    """Every parameter that this rank owns a part of, with its innermost optimizer state."""
    for member in chained(optimizer):
        for model_parameter, inner in _owned_parameters(member):
            yield _read_state(member, model_parameter, inner)


def _owned_parameters(member: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(model parameter, the tensor that stands for it in the inner optimizer's param groups)."""
    use_model_dtype = member.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    halves = member.shard_float16_groups if use_model_dtype else None
    halves = halves or member.shard_fp32_from_float16_groups
    for models, inners in zip(member.model_float16_groups, halves, strict=True):
        yield from zip(models, inners, strict=True)
    for models, inners in zip(member.model_fp32_groups, member.shard_fp32_groups, strict=True):
        yield from zip(models, inners, strict=True)


def _read_state(member: Any, model_parameter: torch.Tensor, inner: Any) -> ParameterState:
    buffer_index, dtype, bucket_index = member.model_param_gbuf_map[model_parameter]
    bucket = member.gbuf_ranges[buffer_index][dtype][bucket_index]
    part = bucket["param_map"][model_parameter]["param"]
    outer = member.optimizer
    owner, leaf = outer, inner
    if hasattr(outer, "sub_optimizers"):
        leaf = outer.param_to_inner_param[inner]
        owner = next(sub for sub in outer.sub_optimizers if _group_of(sub, leaf) is not None)
    state = owner.state.get(leaf, {})
    stored = {
        kind: value
        for kind, value in state.items()
        if isinstance(value, torch.Tensor) and value is not leaf
    }
    group = _group_of(owner, leaf) or {}
    step = state.get("step", group.get("step"))
    outer_group = _group_of(outer, inner) or {}
    return ParameterState(
        model_parameter,
        part.start,
        part.end,
        _master(owner, leaf, state),
        {kind: stored[kind] for kind in stored if kind not in ("step", "master_param")},
        dict(getattr(owner, "_scales", {}).get(leaf, {})),
        None if step is None else float(step),
        {key: _number(outer_group[key]) for key in GROUP_KEYS if outer_group.get(key) is not None},
        stored,
        owner,
        leaf,
        inner,
    )


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, torch.Tensor) else value


def _kinds(states: list[ParameterState]) -> dict[str, list[str]]:
    """How each class of optimizer keeps its steps and learning rates: as numbers or as tensors."""
    found: dict[str, set[str]] = {}
    for state in states:
        group = _group_of(state.owner, state.leaf) or {}
        for name, value in (
            ("step", state.stored.get("step", group.get("step"))),
            ("lr", group.get("lr")),
        ):
            if value is not None:
                found.setdefault(f"{name} of {type(state.owner).__name__}", set()).add(_kind(value))
    return {name: sorted(kinds) for name, kinds in found.items()}


def _kind(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{value.dtype} {tuple(value.shape)} on {value.device.type}"


def _group_of(optimizer: Any, parameter: torch.Tensor) -> dict[str, Any] | None:
    for group in optimizer.param_groups:
        if any(member is parameter for member in group["params"]):
            found: dict[str, Any] = group
            return found
    return None


def _master(owner: Any, leaf: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    """The fp32 master of a part, wherever this optimizer keeps it; bf16 when it has none yet."""
    stored: torch.Tensor | None = state.get("master_param")
    if stored is None or stored is leaf or leaf.dtype == torch.float32:
        # FusedAdam updates a float32 parameter itself; the master it keeps beside it is stale.
        return leaf.detach()
    if stored.dtype == torch.int16:
        return master_from_remainder(leaf.detach(), stored)
    scale = getattr(owner, "_scales", {}).get(leaf, {}).get("master_param")
    if scale is None:
        return stored
    decoded: torch.Tensor = stored.float() * scale
    return decoded


def _pieces(job: Job, states: list[ParameterState]) -> Iterator[dict[str, Any]]:
    places = parameter_places(job)
    for parameter in job.gpt.parameters():
        yield _piece(places[id(parameter)], {"model": parameter}, 0, parameter.numel(), {})
    for state in states:
        grad = state.model_parameter.main_grad.view(-1)[state.start : state.end]
        tensors = {"master": state.master, "grad": grad, **state.tensors}
        # A float8 tensor applies its own scale; the optimizer's note of it decides nothing.
        tensors.update(
            {
                f"{kind}.scale": scale
                for kind, scale in state.scales.items()
                if kind in state.tensors and state.tensors[kind].dtype == torch.float16
            }
        )
        scalars: dict[str, Any] = {f"group.{key}": value for key, value in state.group.items()}
        scalars["step"] = state.step
        place = places[id(state.model_parameter)]
        yield _piece(place, tensors, state.start, state.end, scalars)


def _piece(
    place: list[dict[str, Any]],
    tensors: dict[str, torch.Tensor],
    start: int,
    end: int,
    scalars: dict[str, Any],
) -> dict[str, Any]:
    flat = {kind: _values(value).reshape(-1).cpu().clone() for kind, value in tensors.items()}
    return {"place": place, "start": start, "end": end, "tensors": flat, "scalars": scalars}


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor; of Transformer Engine's float8 tensors, the values that they stand for."""
    return (tensor.dequantize() if hasattr(tensor, "_quantizer") else tensor).detach()


def parameter_places(job: Job) -> dict[int, list[dict[str, Any]]]:
    """Where each local parameter lies in the global model, by `id` of the parameter.

    A place is a list of parts: checkpoint key, global shape and offset, shape (prepended axes
    folded in), and the flat indices within the local parameter. A probe of running numbers is sent
    through the model's own sharding (factories too), so no assumption about them is needed here.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    places: dict[int, list[dict[str, Any]]] = {}
    for sharded in nested_values(job.gpt.sharded_state_dict(metadata=model_metadata())):
        if not isinstance(sharded, (ShardedTensor, ShardedTensorFactory)) or sharded.data is None:
            continue
        data = sharded.data
        probe = torch.arange(data.numel()).view(data.shape)
        if isinstance(sharded, ShardedTensorFactory):
            built = nested_values(replace(sharded, data=probe).build())
            parts = [part for part in built if isinstance(part, ShardedTensor)]
        else:
            parts = [replace(sharded, data=probe, dtype=probe.dtype)]
        places.setdefault(id(data), [_part(part) for part in parts])
    return places


def model_metadata() -> dict[str, Any]:
    """The metadata that Megatron's training passes to a model's sharded_state_dict."""
    from megatron.core import parallel_state

    return {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _part(part: Any) -> dict[str, Any]:
    shape = (1,) * part.prepend_axis_num + tuple(part.data.shape)
    return {
        "key": part.key,
        "global_shape": tuple(part.global_shape),
        "offset": tuple(part.global_offset),
        "shape": shape,
        "index": part.data.reshape(-1).clone(),
    }


def _job_scalars(job: Job) -> dict[str, Any]:
    scheduler = job.scheduler.state_dict()
    return {
        "iteration": job.iteration,
        "data_cursor": job.consumed_samples,
        **{f"scheduler.{key}": value for key, value in scheduler.items()},
        **_scaler_scalars(job),
    }


def _scaler_scalars(job: Job) -> dict[str, Any]:
    scalers = {id(m.grad_scaler): m.grad_scaler for m in chained(job.optimizer) if m.grad_scaler}
    return {
        f"scaler{index}.{key}": float(value)
        for index, scaler in enumerate(scalers.values())
        for key, value in scaler.state_dict().items()
    }


def rng_state() -> dict[str, torch.Tensor]:
    """All generator states as integer tensors: python, numpy, torch, Megatron's tracker."""
    from megatron.core import tensor_parallel

    python = random.getstate()[1]
    numpy: Any = np.random.get_state()
    state = {
        "python": torch.tensor(python, dtype=torch.int64),
        "numpy": torch.tensor([*numpy[1].tolist(), numpy[2]], dtype=torch.int64),
        "torch": torch.default_generator.get_state(),
        "cuda": torch.cuda.get_rng_state().cpu().clone(),
    }
    tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
    for name, value in sorted(tracker.items()):
        state[f"tracker.{name}"] = value.cpu().clone()
    return state


def is_rng_state(state: dict[str, torch.Tensor]) -> bool:
    """Whether every generator is where `rng_state` found it."""
    return all(torch.equal(state[key], value) for key, value in rng_state().items())


def set_rng_state(state: dict[str, torch.Tensor]) -> None:
    """Inverse of `rng_state`."""
    from megatron.core import tensor_parallel

    random.setstate((3, tuple(state["python"].tolist()), None))
    words = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(words[:-1], dtype=np.uint32), words[-1], 0, 0.0))
    torch.default_generator.set_state(state["torch"])
    torch.cuda.set_rng_state(state["cuda"])
    tracker = {
        name.removeprefix("tracker."): value
        for name, value in state.items()
        if name.startswith("tracker.")
    }
    tensor_parallel.get_cuda_rng_tracker().set_states(tracker)


def memory_use(states: list[ParameterState]) -> dict[str, Any]:
    """Bytes that the optimizer's state tensors have, and that their storages hold.

    `aliased`: the states ("index.kind") that share a storage with one before them, and so param
    groups. A master that is the optimizer's own leaf is counted with the parameters, not here.
    """
    own_bytes = held_bytes = 0
    owners: dict[int, str] = {}
    aliased: list[str] = []
    for index, state in enumerate(states):
        for kind, stored in state.stored.items():
            # A float8 tensor is a wrapper without memory of its own around its codes.
            tensor: torch.Tensor = getattr(stored, "_data", stored)
            storage = tensor.untyped_storage()
            name = f"{index}.{kind}"
            own_bytes += tensor.numel() * tensor.element_size()
            if storage.nbytes() and storage.data_ptr() in owners:
                aliased.append(f"{name} with {owners[storage.data_ptr()]}")
                continue
            owners[storage.data_ptr()] = name
            held_bytes += storage.nbytes()
    aliased += _shared_between_groups(states)
    return {"own_bytes": own_bytes, "held_bytes": held_bytes, "aliased": aliased}


def _shared_between_groups(states: list[ParameterState]) -> list[str]:
    """Steps and learning rates that are tensors, and the same ones in several groups."""
    groups = {id(group): group for s in states if (group := _group_of(s.owner, s.leaf))}
    owners: set[int] = set()
    shared = []
    for group in groups.values():
        for key in ("step", "lr"):
            if isinstance(value := group.get(key), torch.Tensor):
                if value.data_ptr() in owners:
                    shared.append(f"{key} of a param group with another group's")
                owners.add(value.data_ptr())
    return shared

"""Which backend an inner optimizer is. Told by what it can do, so that forks are understood too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from vime_optim.optimizer.record import record_of

STATE_MASTER = "master_param"
"""Key under which FusedAdam and HybridDeviceOptimizer keep the master parameter in `state`."""

MASTER = "param"
"""Key of the master parameter in Megatron's param state (get/set and checkpoint keys)."""


def is_hybrid(inner: Any) -> bool:
    """True for Megatron's HybridDeviceOptimizer (CPU offload)."""
    return hasattr(inner, "sub_optimizers") and hasattr(inner, "param_to_inner_param")


def is_transformer_engine(inner: Any) -> bool:
    """True for Transformer Engine's FusedAdam, whose states may be scaled or coded."""
    return hasattr(inner, "set_scaled_state") and hasattr(inner, "get_unscaled_state")


def is_native(inner: Any) -> bool:
    """True for torch's own Adam and AdamW, which keep a `step` tensor per parameter."""
    return isinstance(inner, (torch.optim.Adam, torch.optim.AdamW))


def is_apex(inner: Any) -> bool:
    """True for NVIDIA Apex's FusedAdam and classes derived from it.

    Two moments in float32 for each parameter; a step for each param group that holds parameters.
    """
    return any(
        base.__name__ == "FusedAdam" and base.__module__.split(".")[:2] == ["apex", "optimizers"]
        for base in type(inner).__mro__
    )


_COUNTLESS = (
    ("torch", "SGD"),
    ("apex", "FusedSGD"),
    ("transformer_engine", "FusedSGD"),
    ("emerging_optimizers", "Lion"),
    ("emerging_optimizers", "OrthogonalizedOptimizer"),  # Muon and its kin
)
"""(package, class) of optimizers that count no steps, and of the bases of such."""


def counts_steps_in(optimizer: Any) -> str | None:
    """Where an optimizer that holds state counts its steps.

    Returns:
        'states' (a `step` beside the moments of each parameter), 'groups' (one in each param
        group), 'nowhere', or None for a class that is not known and has not counted yet.
    """
    if is_native(optimizer):
        return "states"
    if is_transformer_engine(optimizer) or is_apex(optimizer):
        return "groups"
    bases = {(base.__module__.split(".")[0], base.__name__) for base in type(optimizer).__mro__}
    if not bases.isdisjoint(_COUNTLESS):
        return "nowhere"
    if any("step" in state for state in optimizer.state.values()):
        return "states"
    return "groups" if any("step" in group for group in optimizer.param_groups) else None


def counts_steps(inner: Any) -> bool:
    """Whether an optimizer, or a part of it, is known to count its steps."""
    parts = sub_optimizers(inner)
    if not parts:
        # CPU offload of a rank that holds no parameter: told by what its parts would be.
        kinds = (getattr(inner, f"{half}_optimizer_cls", None) for half in ("cpu", "gpu"))
        return any(isinstance(kind, type) and _is_adam(kind) for kind in kinds)
    return any(counts_steps_in(part) in ("states", "groups") for part in parts)


def _is_adam(kind: type) -> bool:
    return issubclass(kind, (torch.optim.Adam, torch.optim.AdamW)) or any(
        base.__name__ == "FusedAdam" for base in kind.__mro__
    )


def is_precision_aware(dist_opt: Any) -> bool:
    """True when the inner optimizer, not Megatron, holds the master parameters."""
    return bool(getattr(dist_opt.config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False))


def sub_optimizers(inner: Any) -> list[Any]:
    """The optimizers that hold state: those inside a HybridDeviceOptimizer, or `inner` itself."""
    return list(inner.sub_optimizers) if is_hybrid(inner) else [inner]


def members(optimizer: Any) -> Iterator[Any]:
    """The optimizers that hold states: a chain may be a member of another one (layer-wise Muon)."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is None:
        yield optimizer
    else:
        for member in chained:
            yield from members(member)


def is_stub(dist_opt: Any) -> bool:
    """True for an optimizer of nothing trainable, which has no inner optimizer."""
    return bool(getattr(dist_opt, "is_stub_optimizer", False))


def has_buffers(dist_opt: Any) -> bool:
    """False for stubs and Megatron-FSDP, which keep no DDP buffers."""
    if is_stub(dist_opt):
        return False
    return not getattr(dist_opt.ddp_config, "use_megatron_fsdp", False)


def optimizer_param(dist_opt: Any, model_param: torch.Tensor) -> torch.Tensor:
    """The 1-D shard that the inner optimizer knows `model_param` by."""
    correct_group_map(dist_opt)
    group_index, order = dist_opt.model_param_group_index_map[model_param]
    param: torch.Tensor = dist_opt.optimizer.param_groups[group_index]["params"][order]
    return param


def correct_group_map(dist_opt: Any) -> None:
    """Make `model_param_group_index_map` say where each parameter is in its param group (F20).

    Megatron counts parameters in the order of the buffers, but lists the float32 ones of a group
    first. Where a group holds both, states are saved and loaded under another parameter's name.
    """
    record = record_of(dist_opt)
    if record.is_group_map_right:
        return
    right = {}
    pairs = zip(dist_opt.model_fp32_groups, dist_opt.model_float16_groups, strict=True)
    for group_index, (fp32_params, float16_params) in enumerate(pairs):
        for order, param in enumerate((*fp32_params, *float16_params)):
            right[param] = (group_index, order)
    if right.keys() == dist_opt.model_param_group_index_map.keys():
        record.stock_group_map = dist_opt.model_param_group_index_map
        dist_opt.model_param_group_index_map = right
    record.is_group_map_right = True


def stock_group_map(dist_opt: Any) -> dict[torch.Tensor, tuple[int, int]]:
    """Model parameter to (group, order in it) as stock megatron-core takes it to be."""
    correct_group_map(dist_opt)
    made = record_of(dist_opt).stock_group_map
    stock: dict[torch.Tensor, tuple[int, int]] = (
        dist_opt.model_param_group_index_map if made is None else made
    )
    return stock


def owned_params(dist_opt: Any) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    """(model parameter, its range map) for every parameter that this rank holds a shard of."""
    for ranges_by_dtype in dist_opt.gbuf_ranges:
        for buckets in ranges_by_dtype.values():
            for bucket in buckets:
                yield from bucket["param_map"].items()


def param_name(dist_opt: Any, model_param: torch.Tensor) -> str:
    """The model's name for a parameter, for messages."""
    for chunk in dist_opt.model_chunks:
        for name, param in chunk.named_parameters():
            if param is model_param:
                return str(name).removeprefix("module.").removeprefix("module.")
    return f"<unnamed parameter of shape {tuple(model_param.shape)}>"

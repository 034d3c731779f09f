"""The only reader of Megatron's buffers: which range of which parameter is this rank's, and where
that parameter lies in the checkpoint.

Order and numbering of the parameters are Megatron's own (buffer by buffer, as in
`param_index_map`), so that the entries of a state dict mean the same to both.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from vime_optim.errors import PlanError
from vime_optim.optimizer.kinds import param_name
from vime_optim.reshard.plan import ParamRun


@dataclass(frozen=True)
class ParamLayout:
    """One parameter of the buffers, as this rank sees it.

    Attributes:
        index: position in Megatron's numbering of all parameters of this optimizer.
        param: the model parameter.
        name: its checkpoint key in the model's state dict and its number.
        base: the model's ShardedTensor or ShardedTensorFactory for it.
        start, end: this rank's half-open range of the flat parameter; equal when it holds none.
        targets: runs of the flat parameter and their places in the checkpoint, or None when the
            parameter cannot be cut and must be gathered.
    """

    index: int
    param: torch.Tensor
    name: str
    base: Any
    start: int
    end: int
    targets: tuple[ParamRun, ...] | None

    @property
    def numel(self) -> int:
        return self.param.numel()

    @property
    def is_owned(self) -> bool:
        return self.end > self.start


def param_layouts(dist_opt: Any, model_sharded_state_dict: Any) -> Iterator[ParamLayout]:
    """Every parameter of the optimizer's buffers, owned by this rank or not, in Megatron's order.

    Raises:
        PlanError: a parameter is missing from the model's sharded state dict, or has another size
            there.
    """
    bases = _bases(model_sharded_state_dict)
    for index, (param, ranges) in enumerate(_params(dist_opt)):
        base = bases.get(id(param))
        if base is None:
            raise PlanError(
                "a parameter is missing from the model's sharded state dict",
                where=param_name(dist_opt, param),
                expected="the parameter itself as `data` of a ShardedTensor or factory",
                next_step="build the model's state dict with the parameters kept"
                " (sharded_state_dict() does; state_dict(keep_vars=True))",
            )
        owned = ranges["param"] if ranges is not None else None
        yield ParamLayout(
            index=index,
            param=param,
            # Layers share a key and differ by an axis that the key's tensor is stacked along.
            name=f"{base.key} (parameter {index})",
            base=base,
            start=owned.start if owned is not None else 0,
            end=owned.end if owned is not None else 0,
            targets=_targets(base, param, dist_opt.distributed_optimizer_instance_id),
        )


def _params(dist_opt: Any) -> Iterator[tuple[torch.Tensor, Mapping[str, Any] | None]]:
    for buffer, ranges_by_dtype in zip(dist_opt.buffers, dist_opt.gbuf_ranges, strict=True):
        for buckets in ranges_by_dtype.values():
            owned = ChainMap(*(bucket["param_map"] for bucket in buckets))
            for param in buffer.param_index_map:
                yield param, owned.get(param)


def _bases(model_sharded_state_dict: Any) -> dict[int, Any]:
    """id of a parameter to the ShardedTensor or factory that describes it."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

    sharded, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
    return {id(base.data): base for base in nested_values(sharded)}


def _targets(base: Any, param: torch.Tensor, instance: int) -> tuple[ParamRun, ...] | None:
    """The runs of a parameter, or None when its layout cannot be cut without moving elements."""
    replica = getattr(base, "replica_id", None)
    if not isinstance(replica, tuple) or len(replica) != 3:
        return None
    # Every data-parallel rank holds another range, so none is a replica of another: the last
    # coordinate counts optimizer instances instead of data-parallel ranks.
    replica = (*replica[:2], instance)
    if hasattr(base, "build_fn"):
        return _factory_targets(base, param, replica)
    if getattr(base, "flattened_range", None) is not None:
        return None
    if prod(base.local_shape) != param.numel():
        raise PlanError(
            "the model's sharded state dict describes a parameter as if it had another size",
            where=base.key,
            got=f"local shape {tuple(base.local_shape)}",
            expected=f"the elements of {tuple(param.shape)}",
            next_step="report the model and its parallel layout",
        )
    return (_target(base, replica, 0),)


def _factory_targets(
    factory: Any, param: torch.Tensor, replica: tuple[int, ...]
) -> tuple[ParamRun, ...] | None:
    """Build the factory on a tensor without memory and see which flat range each part is."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    probe = torch.empty(param.shape, dtype=torch.float32, device="meta")
    storage = probe.untyped_storage()._cdata
    targets = []
    position = 0
    try:
        parts = list(nested_values(replace(factory, data=probe, replica_id=replica).build()))
    except (RuntimeError, NotImplementedError):
        return None  # the factory looks at values
    for part in sorted(parts, key=_storage_offset):
        data = getattr(part, "data", None)
        if not isinstance(data, torch.Tensor) or data.untyped_storage()._cdata != storage:
            return None
        if not data.is_contiguous() or data.storage_offset() != position:
            return None
        if getattr(part, "flattened_range", None) is not None:
            return None
        targets.append(_target(part, replica, position))
        position += data.numel()
    return tuple(targets) if position == param.numel() else None


def _storage_offset(part: Any) -> int:
    data = getattr(part, "data", None)
    return int(data.storage_offset()) if isinstance(data, torch.Tensor) else -1


def _target(sharded: Any, replica: tuple[int, ...], flat_start: int) -> ParamRun:
    # A part may give its own first two coordinates (a replica across tensor-parallel ranks).
    own = sharded.replica_id
    first = tuple(own[:2]) if isinstance(own, tuple) and len(own) == 3 else replica[:2]
    return ParamRun(
        key=sharded.key,
        global_shape=tuple(sharded.global_shape),
        global_offset=tuple(sharded.global_offset),
        local_shape=tuple(sharded.local_shape),
        flat_start=flat_start,
        replica_id=(*first, replica[2]),
    )

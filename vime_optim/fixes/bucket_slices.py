"""dp_reshardable where padding crosses the ranks' slices of a bucket.

Symptom: a save dies with `empty bucket encountered`, or its chunks are refused (F22).
Cause: every rank is taken to hold a parameter of every bucket, and padding to fill its slice.
Changes: the entries of a bucket get their padding here, cut at the end of the data. A rank whose
slice holds none of the data gets one entry without tensors; one that holds padding alone asks the
others what states there are.
Leaves alone: keys, shapes and offsets of the format, which stock megatron-core loads.
Remove when: Megatron pads no further than to numel_unpadded and takes empty slices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from vime_optim import collectives
from vime_optim.errors import OptimizerStateError
from vime_optim.fixes.places import DISTRIBUTED_OPTIMIZER
from vime_optim.registry import Fix, Hit, takes

_START, _END = "gbuf_local_start", "gbuf_local_end"
_PARAM_ALIGN_NUMEL = 64
"""Parameters start at multiples of this, so no gap between two is as long."""

Entry = dict[str, Any]
Dtypes = Mapping[str, torch.dtype]


FIX = Fix(
    id="bucket-slices",
    faults=("F22",),
    summary="dp_reshardable is saved where padding crosses the ranks' slices of a bucket",
)


@FIX.wraps(DISTRIBUTED_OPTIMIZER, "get_parameter_state_dp_reshardable", takes("self"))
def _param_state(original: Any, hit: Hit, self: Any) -> Any:
    state = original(self)
    hit()
    lay_out_padding(self, state)
    return state


@FIX.wraps(DISTRIBUTED_OPTIMIZER, "sharded_param_state_dp_reshardable", takes("self"))
def _sharded(original: Any, hit: Hit, self: Any, *args: Any, **kwargs: Any) -> Any:
    state = original(self, *args, **kwargs)
    for index in range(len(self.gbuf_ranges)):
        for dtype, buckets in state[index].items():
            # Megatron's load takes lists apart and loses a bucket without tensors; a dict it
            # puts together by key.
            if isinstance(buckets, list) and not all(map(_has_tensors, buckets)):
                hit()
                state[index][dtype] = dict(enumerate(buckets))
    return state


def _has_tensors(entries: list[Entry]) -> bool:
    return any(len(entry) > 1 for entry in entries)


def lay_out_padding(dist_opt: Any, state: dict[Any, Any]) -> None:
    """Put padding entries into the param state of dp_reshardable, in place."""
    group = dist_opt.data_parallel_group
    dtypes = [_dtypes_of(state[index].values()) for index in range(len(dist_opt.gbuf_ranges))]
    if any(_holds_padding_alone(buffer, group.size()) for buffer in dist_opt.buffers):
        dtypes = _agreed(dtypes, group)
    for index, buffer in enumerate(dist_opt.buffers):
        for buckets in state[index].values():
            for number, entries in enumerate(buckets):
                bucket = buffer.buckets[number]
                length = bucket.grad_data.numel() // group.size()
                end = min(max(bucket.numel_unpadded - group.rank() * length, 0), length)
                buckets[number] = _padded(entries, end, dtypes[index])


def _padded(entries: list[Entry], end: int, dtypes: Dtypes) -> list[Entry]:
    """The entries of a rank's slice with padding in every gap before `end`, in elements."""
    filled: list[Entry] = []
    position = 0
    for entry in entries:
        if entry[_START] > position:
            filled.append(_padding(position, entry[_START], dtypes))
        filled.append(entry)
        position = entry[_END]
    if position < end:
        filled.append(_padding(position, end, dtypes))
    return filled or [_padding(0, 0, {})]


def _padding(start: int, end: int, dtypes: Dtypes) -> Entry:
    if end > start and not dtypes:
        raise OptimizerStateError("no rank holds a state of a bucket that is to be saved")
    zeros = {name: torch.zeros(end - start, dtype=dtype) for name, dtype in dtypes.items()}
    return {**zeros, _START: start, _END: end, "padding": True}


def _dtypes_of(buckets_by_dtype: Iterable[list[list[Entry]]]) -> Dtypes:
    """State names and dtypes of a buffer, from any of its parameters on this rank."""
    for buckets in buckets_by_dtype:
        for entry in (entry for entries in buckets for entry in entries):
            return {k: v.dtype for k, v in entry.items() if isinstance(v, torch.Tensor)}
    return {}


def _holds_padding_alone(buffer: Any, ranks: int) -> bool:
    """Whether some rank's slice of a bucket lies wholly between two parameters.

    Computed from what all ranks know, so that they agree on asking one another.
    """
    for number, bucket in enumerate(buffer.buckets):
        length = bucket.grad_data.numel() // ranks
        if length >= _PARAM_ALIGN_NUMEL:
            continue
        held: set[int] = set()
        for start, end, owner in buffer.param_index_map.values():
            if owner == number:
                first = (start - bucket.offset) // length
                held.update(range(first, (end - bucket.offset - 1) // length + 1))
        if not set(range(-(-bucket.numel_unpadded // length))) <= held:
            return True
    return False


def _agreed(dtypes: list[Dtypes], group: Any) -> list[Dtypes]:
    everywhere = collectives.gathered(dtypes, group)
    return [
        next((there[index] for there in everywhere if there[index]), own)
        for index, own in enumerate(dtypes)
    ]

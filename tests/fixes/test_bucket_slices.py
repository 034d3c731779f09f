"""Padding in a rank's slice of a bucket (F22); on whole saves: test_reported_faults."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vime_optim.errors import OptimizerStateError
from vime_optim.fixes.bucket_slices import _holds_padding_alone, _padded

DTYPES = {"param": torch.float32, "exp_avg": torch.bfloat16}


def entry(start: int, end: int) -> dict[str, Any]:
    tensors = {name: torch.ones(end - start, dtype=dtype) for name, dtype in DTYPES.items()}
    return {**tensors, "gbuf_local_start": start, "gbuf_local_end": end}


@pytest.mark.parametrize(
    ("held", "end", "ranges"),
    [
        ([], 0, [(0, 0)]),  # a slice behind the data: one entry, without tensors
        ([], 8, [(0, 8)]),  # one that holds padding alone
        ([(0, 8)], 8, [(0, 8)]),
        ([(2, 4), (6, 7)], 10, [(0, 2), (2, 4), (4, 6), (6, 7), (7, 10)]),
        ([(0, 4)], 3, [(0, 4)]),
    ],
)
def test_every_gap_before_the_end_of_the_data_is_filled(
    held: list[tuple[int, int]], end: int, ranges: list[tuple[int, int]]
) -> None:
    own = [entry(*at) for at in held]
    filled = _padded(own, end, DTYPES)
    assert [(e["gbuf_local_start"], e["gbuf_local_end"]) for e in filled] == ranges
    assert [e for e in filled if not e.get("padding")] == own
    for padding in (e for e in filled if e.get("padding")):
        numel = padding["gbuf_local_end"] - padding["gbuf_local_start"]
        tensors = {k: v for k, v in padding.items() if isinstance(v, torch.Tensor)}
        assert {k: v.dtype for k, v in tensors.items()} == (DTYPES if numel else {})
        assert all(v.numel() == numel and not v.any() for v in tensors.values())


def test_padding_of_states_that_nobody_knows_is_refused() -> None:
    with pytest.raises(OptimizerStateError, match="no rank holds a state"):
        _padded([], 4, {})


class _Bucket:
    def __init__(self, numel: int, unpadded: int) -> None:
        self.grad_data = torch.empty(numel)
        self.numel_unpadded, self.offset = unpadded, 0


@pytest.mark.parametrize(
    ("params", "ranks", "alone"),
    [
        ([(0, 30), (32, 64)], 4, False),
        ([(0, 10), (48, 64)], 4, True),
        ([(0, 10), (48, 64)], 1, False),
    ],
)
def test_a_slice_between_two_parameters_is_noticed_by_all(
    params: list[tuple[int, int]], ranks: int, alone: bool
) -> None:
    places = {number: (*at, 0) for number, at in enumerate(params)}
    buffer = SimpleNamespace(buckets=[_Bucket(64, 64)], param_index_map=places)
    assert _holds_padding_alone(buffer, ranks) == alone

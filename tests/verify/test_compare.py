from __future__ import annotations

from typing import Any

import pytest
import torch

from vime_optim.errors import VerifyError
from vime_optim.verify.compare import State, assemble, compare, load_state, round_tied_masters


def _part(key: str, global_shape: tuple[int, ...], offset: tuple[int, ...], shape: Any) -> Any:
    numel = int(torch.tensor(shape).prod())
    return {
        "key": key,
        "global_shape": global_shape,
        "offset": offset,
        "shape": tuple(shape),
        "index": torch.arange(numel),
    }


def _record(*pieces: dict[str, Any], scalars: dict[str, Any] | None = None) -> dict[str, Any]:
    rng = {"torch": torch.arange(4, dtype=torch.uint8)}
    return {"pieces": list(pieces), "scalars": scalars or {}, "rng": rng, "memory": {}}


def _piece(part: Any, start: int, values: torch.Tensor, step: float = 3.0) -> dict[str, Any]:
    return {
        "place": [part],
        "start": start,
        "end": start + values.numel(),
        "tensors": {"exp_avg": values},
        "scalars": {"step": step},
    }


def _state(values: torch.Tensor) -> State:
    return assemble([_record(_piece(_part("w", (2, 3), (0, 0), (2, 3)), 0, values))])


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
)
def test_one_flipped_bit_is_found(dtype: torch.dtype) -> None:
    values = torch.randn(6).to(dtype)
    flipped = values.clone()
    flipped.view(torch.uint8)[3] ^= 1

    assert compare(_state(values), _state(values.clone())) == []
    (difference,) = compare(_state(values), _state(flipped))
    assert (difference.kind, difference.name, difference.count) == ("exp_avg", "w", 1)


def test_nan_of_the_same_bits_is_equal_and_signed_zero_is_not() -> None:
    nan = torch.full((6,), float("nan"))
    zero = torch.zeros(6)

    assert compare(_state(nan), _state(nan.clone())) == []
    assert compare(_state(zero), _state(-zero))[0].count == 6


def test_shards_of_any_cut_give_the_same_state() -> None:
    values = torch.randn(6)
    part = _part("w", (2, 3), (0, 0), (2, 3))
    cut = [_record(_piece(part, 0, values[:4])), _record(_piece(part, 4, values[4:]))]
    rows = [
        _record(_piece(_part("w", (2, 3), (0, 0), (1, 3)), 0, values[:3])),
        _record(_piece(_part("w", (2, 3), (1, 0), (1, 3)), 0, values[3:])),
    ]

    assert compare(_state(values), assemble(cut)) == []
    assert compare(_state(values), assemble(rows)) == []


def test_what_no_rank_holds_is_reported() -> None:
    part = _part("w", (2, 3), (0, 0), (2, 3))
    state = assemble([_record(_piece(part, 0, torch.zeros(4)))])

    assert "2 of 6 elements are held by no rank" in str(state.conflicts[0])
    assert compare(state, state)


def test_replicas_that_disagree_are_reported() -> None:
    part = _part("w", (2, 3), (0, 0), (2, 3))
    values = torch.randn(6)
    other = values.clone()
    other[5] += 1
    state = assemble([_record(_piece(part, 0, values)), _record(_piece(part, 0, other, step=4.0))])

    texts = sorted(map(str, state.conflicts))
    assert len(texts) == 2
    assert "replicas disagree in 1 elements" in texts[0]
    assert "replicas disagree: 3.0 and 4.0" in texts[1]


def test_missing_names_shapes_and_dtypes_differ() -> None:
    values = torch.randn(6)
    wide = assemble([_record(_piece(_part("w", (6,), (0,), (6,)), 0, values))])

    (missing,) = compare(_state(values), State(values={("step", "w"): 3.0}), skip={"rng"})
    assert "only in the first run" in str(missing)
    assert "shape (6,) instead of (2, 3)" in str(compare(_state(values), wide)[0])
    assert "dtype torch.bfloat16" in str(compare(_state(values), _state(values.bfloat16()))[0])


def test_one_rounding_may_be_allowed() -> None:
    values = torch.randn(6)
    rounded = values.bfloat16()
    wrong = rounded.clone()
    wrong.view(torch.int16)[0] += 1

    assert compare(_state(values), _state(rounded), round_to_got=True) == []
    assert compare(_state(values), _state(wrong), round_to_got=True)[0].count == 1


def test_a_master_between_two_bf16_values_may_lose_its_last_bit_to_a_remainder() -> None:
    bits = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF], dtype=torch.int32)
    master = bits.view(torch.float32)  # half to even: the first goes down, the second up

    got = round_tied_masters(master).view(torch.int32)

    expected = [0x3F807FFF, 0x3F818000, 0x3F808001, 0x3F807FFF]
    assert got.tolist() == expected


def test_scalars_and_generators_are_compared() -> None:
    first = assemble([_record(scalars={"iteration": 3, "lr": 0.1})])
    second = assemble([_record(scalars={"iteration": 4, "lr": 0.1})])
    second.tensors["rng", "torch"] = torch.tensor([0, 1, 2, 9], dtype=torch.uint8)

    assert [str(d) for d in compare(first, second)] == [
        "rng torch: 1 of 4 elements differ, max abs 6",
        "job iteration: 4 instead of 3",
    ]
    assert compare(first, second, skip={"rng", "job"}) == []


def test_a_folder_without_captures(tmp_path: Any) -> None:
    with pytest.raises(VerifyError, match="no captured state"):
        load_state(tmp_path)

"""What benchmarks/topology8.py compares by, and its committed results."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch

from benchmarks import topology_report
from benchmarks.fingerprint import Part, _sum, differences
from benchmarks.topology_model import Shape, Topology, local_positions

SHAPE = (6, 10)
RESULTS = sorted((Path(__file__).parents[2] / "benchmarks/results").glob("topology8*.json"))


def total(values: torch.Tensor, cuts: tuple[int, int], flat_cut: int) -> tuple[int, int]:
    """Fingerprint of a global tensor from boxes, each held in two flat pieces."""
    result, numel = 0, 0
    rows, columns = (torch.arange(size).chunk(n) for size, n in zip(SHAPE, cuts, strict=True))
    for mine in product(rows, columns):
        box = values[mine[0]][:, mine[1]].contiguous()
        offset = (int(mine[0][0]), int(mine[1][0]))
        part = Part("key", 0, tuple(box.shape), offset, SHAPE)
        flat = box.view(-1)
        for start, piece in ((0, flat[:flat_cut]), (flat_cut, flat[flat_cut:])):
            value, count = _sum(part, piece, start, torch.device("cpu"))
            result, numel = (result + value) % 2**64, numel + count
    return result, numel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cuts", [(2, 1), (1, 2), (3, 2)])
def test_a_fingerprint_does_not_depend_on_the_layout(
    dtype: torch.dtype, cuts: tuple[int, int]
) -> None:
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert total(values, cuts, 3) == total(values, (1, 1), 17)


def test_a_fingerprint_changes_with_every_bit_and_place() -> None:
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    seen = {total(values, (1, 1), 5)}
    for element, bit in product(range(0, 60, 7), range(32)):
        changed = values.clone()
        changed.view(-1).view(torch.int32)[element] ^= -(2**31) if bit == 31 else 1 << bit
        seen.add(total(changed, (1, 1), 5))
    swapped = values.clone()
    swapped.view(-1)[[3, 4]] = values.view(-1)[[4, 3]]
    seen.add(total(swapped, (1, 1), 5))
    assert len(seen) == 1 + 9 * 32 + 1


def test_a_part_of_a_factory_begins_within_the_parameter() -> None:
    values = torch.arange(1.0, 61.0).view(SHAPE)
    halves = [Part("key", 30 * n, (3, 10), (3 * n, 0), SHAPE) for n in (0, 1)]
    sums = [_sum(part, values.view(-1), 0, torch.device("cpu")) for part in halves]
    assert [count for _, count in sums] == [30, 30]
    assert sum(value for value, _ in sums) % 2**64 == total(values, (1, 1), 5)[0]


def test_differences_names_what_differs_or_is_missing() -> None:
    first = {"model a": [1, 2], "grad a": [5, 2], "step a": 2.0}
    second = {"model a": [1, 3], "grad a": [6, 2], "step a": 2.0, "rng x": "y"}
    assert differences(first, second, ("grad ",)) == ["model a", "rng x"]
    assert differences(first, first, ()) == []


def test_positions_of_context_parallel_ranks_cover_the_sequence() -> None:
    pieces = [local_positions(16, 2, rank) for rank in range(2)]
    assert pieces[0].tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert sorted(torch.cat(pieces).tolist()) == list(range(16))


def test_the_shape_is_that_of_qwen3_4b() -> None:
    shape = Shape()
    assert (shape.width, shape.layers, shape.ffn, shape.vocabulary) == (2560, 36, 9728, 151936)
    assert (shape.heads, shape.query_groups, shape.head_size) == (32, 8, 128)
    assert Topology.parse("2x2", 8) == Topology(tp=2, cp=2, dp=2)
    with pytest.raises(SystemExit, match="cannot be cut"):
        Topology.parse("3x2", 8)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_committed_results_are_exact_and_can_be_shown(path: Path) -> None:
    result = json.loads(path.read_text())
    assert result["checks"]
    assert all(check["exact"] for check in result["checks"])
    assert "vime_optim" in topology_report.markdown(result)

"""Whether tensors are whole is known from one number a rank."""

from __future__ import annotations

import random

import pytest

from vime_optim.reshard.complete import missing_weight
from vime_optim.reshard.plan import ParamRun, Piece, RankPlan, pieces_of_range

LAYERS, SHAPE = 4, (5, 8)
NUMEL = SHAPE[0] * SHAPE[1]


def plans(layers: list[int], ranks: int, replica: int = 0, key: str = "w") -> list[RankPlan]:
    """Layers that are stacked in one tensor, each cut among `ranks` ranks at any place."""
    draw = random.Random(ranks)
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
    for layer in layers:
        target = ParamRun(key, (LAYERS, *SHAPE), (layer, 0, 0), SHAPE, 0, (0, replica, 0))
        cuts = [0, *sorted(draw.randrange(NUMEL + 1) for _ in range(ranks - 1)), NUMEL]
        for rank in range(ranks):
            start, end = cuts[rank], cuts[rank + 1]
            pieces[rank] += pieces_of_range(target, start, end, param=f"{layer}", state="param")
    return [RankPlan(rank, tuple(held)) for rank, held in enumerate(pieces)]


def total(every: list[RankPlan]) -> int:
    """As the ranks add it up: modulo 2**64."""
    return sum(missing_weight([plan]) for plan in every) % (1 << 64)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_whole_tensors_weigh_nothing(ranks: int) -> None:
    assert total(plans([0, 1, 2, 3], ranks)) == 0
    assert total([*plans([0, 1, 2, 3], ranks), *plans([3, 2, 1, 0], 2, key="v")]) == 0


@pytest.mark.parametrize("frozen", [[0], [3], [1, 2], [0, 1, 2]])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_missing_layer_weighs(frozen: list[int], ranks: int) -> None:
    rest = [layer for layer in range(LAYERS) if layer not in frozen]
    assert total(plans(rest, ranks)) != 0
    # Nor does what another tensor lacks make up for it.
    assert total([*plans(rest, ranks), *plans(rest, ranks, key="v")]) != 0


def test_replicas_do_not_count() -> None:
    whole = plans([0, 1, 2, 3], 2)
    assert total([*whole, *plans([0, 1, 2, 3], 2, replica=1)]) == 0
    assert total(plans([0, 1], 2) + plans([2, 3], 2, replica=1)) != 0


def test_a_tensor_that_nobody_writes_is_no_matter() -> None:
    assert total(plans([0, 1, 2, 3], 2, replica=1)) == 0
    assert missing_weight([]) == 0

"""Does every tensor that the ranks are about to write get all of its elements?

Layers that share a checkpoint key are parts of one tensor. Where some of them have no optimizer
state (frozen layers, frozen experts), the others do not fill it, and no file can say so. Known from
one number a rank: each adds up what it writes, weighted by a hash of the key, less the whole tensor
where it writes the first element. Over all ranks that is zero when all is there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import prod

import xxhash

from vime_optim import collectives
from vime_optim.errors import PlanError
from vime_optim.reshard.plan import Piece, RankPlan, check_cover


def missing_weight(plans: Iterable[RankPlan]) -> int:
    """This rank's number, modulo 2**64: the sum over all ranks is zero for whole tensors.

    Takes disjoint pieces for granted; that they are is checked when the save is planned.
    """
    total = 0
    for key, numel in _balance(plans).items():
        total += (xxhash.xxh64_intdigest(key.encode()) | 1) * numel
    return total % (1 << 64)


def _balance(plans: Iterable[RankPlan]) -> dict[str, int]:
    """By key: elements written here, less all of the tensor where its first one is."""
    balance: dict[str, int] = defaultdict(int)
    for plan in plans:
        for piece in plan.pieces:
            if piece.is_main_replica:
                balance[piece.key] += piece.numel
                if not any(piece.offset):
                    balance[piece.key] -= prod(piece.global_shape)
    return balance


def incomplete_tensor(plans: Iterable[RankPlan]) -> PlanError | None:
    """Collective over all ranks, once `missing_weight` is not zero: which tensor, where.

    Returns:
        The same error on every rank, with the first tensor that lacks elements.
    """
    plans = list(plans)
    balances = collectives.gathered(_balance(plans))
    sums: dict[str, int] = defaultdict(int)
    for balance in balances:
        for key, numel in balance.items():
            sums[key] += numel
    key = next((key for key in sorted(sums) if sums[key]), None)
    if key is None:
        return None
    own = [piece for plan in plans for piece in plan.pieces if piece.key == key]
    every: list[list[Piece]] = collectives.gathered(own)
    pieces = [(rank, piece) for rank, held in enumerate(every) for piece in held]
    try:
        check_cover(key, pieces[0][1].global_shape, pieces)
    except PlanError as error:
        return error
    return None

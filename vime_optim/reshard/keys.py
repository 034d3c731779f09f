"""What the ranks of a job must agree on before they write or read, and how they are compared.

Exchanging digests and key lists is the engine's work; here they are only made and compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import xxhash

from vime_optim.errors import PlanError

FORMAT = "1\tfully_reshardable"
"""Part of each digest. The number is raised whenever the keys, shapes or cuts that a plan gives for
the same optimizer change."""


class KeyInfo(NamedTuple):
    """A checkpoint key, and the shape of the whole tensor there, which is float32."""

    key: str
    global_shape: tuple[int, ...]


def digest_of(keys: Iterable[KeyInfo]) -> str:
    """16 hex digits over keys, shapes and format; the order of the keys does not matter."""
    lines = [FORMAT]
    for info in sorted(set(keys)):
        lines.append(f"{info.key}\t{','.join(map(str, info.global_shape))}\tfloat32")
    return str(xxhash.xxh64("\n".join(lines).encode()).hexdigest())


def differing_plans(
    digests: Sequence[str], ranks: Sequence[int], keys_by_rank: Sequence[Sequence[KeyInfo]]
) -> PlanError:
    """The error for ranks whose digests differ: which they are, and the first key that differs.

    Args:
        digests, keys_by_rank: one per rank of the group.
        ranks: their global ranks.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, value in zip(ranks, digests, strict=True):
        groups[value].append(rank)
    return PlanError(
        "The ranks made different plans",
        where=first_difference(keys_by_rank, ranks),
        got="; ".join(f"digest {d}: {rank_list(r)}" for d, r in groups.items()),
        expected="one digest on all ranks",
        next_step="Nothing was written. Check that all ranks run the same model and settings",
    )


def first_difference(keys_by_rank: Sequence[Sequence[KeyInfo]], ranks: Sequence[int]) -> str | None:
    """Describes the first key, in sorted order, on which the ranks differ; None if they agree."""
    common = set.intersection(*map(set, keys_by_rank))
    differing = sorted(set.union(*map(set, keys_by_rank)) - common)
    if not differing:
        return None
    key = differing[0].key
    variants: dict[str, list[int]] = defaultdict(list)
    for rank, infos in zip(ranks, keys_by_rank, strict=True):
        mine = sorted({str(i.global_shape) for i in infos if i.key == key})
        variants[" and ".join(mine) or "absent"].append(rank)
    return f"{key}: " + "; ".join(f"{text} on {rank_list(r)}" for text, r in variants.items())


def rank_list(ranks: Iterable[int]) -> str:
    """Ranks as short text: [0, 1, 2, 4] gives 'ranks 0-2,4'."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"{'ranks' if len(runs) > 1 or (runs and runs[0][0] != runs[0][1]) else 'rank'} {text}"

"""What the ranks of a job must agree on before they write or read, and how they are compared.

Exchanging digests and key lists is the engine's work; here they are only made and compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import xxhash

from vime_optim.errors import PlanError


@dataclass(frozen=True, slots=True, order=True)
class KeyInfo:
    """What every rank must agree on about one checkpoint key.

    Attributes:
        key: the checkpoint key.
        global_shape: shape of the whole tensor in the checkpoint.
        dtype: name of its dtype in the checkpoint, as "float32".
    """

    key: str
    global_shape: tuple[int, ...]
    dtype: str


def digest_of_keys(keys: Iterable[KeyInfo], sharding_type: str, format_version: int) -> str:
    """16 hex digits over keys, shapes, dtypes and format; the order of the keys does not matter."""
    lines = [f"{format_version}\t{sharding_type}"]
    for info in sorted(set(keys)):
        lines.append(f"{info.key}\t{','.join(map(str, info.global_shape))}\t{info.dtype}")
    return str(xxhash.xxh64("\n".join(lines).encode()).hexdigest())


def compare_digests(
    digests: Sequence[str],
    ranks: Sequence[int] | None = None,
    keys_by_rank: Sequence[Sequence[KeyInfo]] | None = None,
) -> None:
    """Raises unless all digests are equal.

    Args:
        digests: one per rank of the group.
        ranks: their global ranks; counted from 0 when left out.
        keys_by_rank: each rank's keys, where the caller has them, to name the first that differs.

    Raises:
        PlanError: grouping the ranks by digest.
    """
    ranks = range(len(digests)) if ranks is None else ranks
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, value in zip(ranks, digests, strict=True):
        groups[value].append(rank)
    if len(groups) <= 1:
        return
    raise PlanError(
        "The ranks made different plans",
        where=first_difference(keys_by_rank, ranks) if keys_by_rank is not None else None,
        got="; ".join(f"digest {d}: {rank_list(r)}" for d, r in groups.items()),
        expected="one digest on all ranks",
        next_step="Nothing was written. Check that all ranks run the same model and settings",
    )


def first_difference(
    keys_by_rank: Sequence[Sequence[KeyInfo]], ranks: Sequence[int] | None = None
) -> str | None:
    """Describes the first key, in sorted order, on which the ranks differ; None if they agree."""
    ranks = range(len(keys_by_rank)) if ranks is None else ranks
    common = set.intersection(*map(set, keys_by_rank))
    differing = sorted(set.union(*map(set, keys_by_rank)) - common)
    if not differing:
        return None
    key = differing[0].key
    variants: dict[str, list[int]] = defaultdict(list)
    for rank, infos in zip(ranks, keys_by_rank, strict=True):
        mine = sorted({f"{i.global_shape} {i.dtype}" for i in infos if i.key == key})
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

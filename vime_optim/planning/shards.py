"""megatron-core's check of shards (`validate_sharding_integrity`), from what ranks send as columns.

The shards of all ranks are sent as columns, and objects are made of them only where somebody asks.
A key whose shards agree in all that must be one, and whose main replicas hit each place of its grid
once, is sound by megatron-core's own rules; the shards of every other key go to its own check.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vime_optim.files.cover import Ints, as_array
from vime_optim.planning.packed import pack as pack_columns
from vime_optim.planning.packed import unpack

_SAME = (
    "dtype",
    "local_shape",
    "global_shape",
    "axis_fragmentations",
    "prepend_axis_num",
    "allow_shape_mismatch",
    "flattened_range",
)


@dataclass(frozen=True)
class PackedShards:
    """One rank's shards. `data`: columns of its tensors; `rest`: what columns do not hold."""

    data: bytes
    rest: tuple[Any, ...]

    def columns(self) -> tuple[list[tuple[Any, ...]], Ints, Ints, dict[int, Ints]]:
        """(key and attributes that shards share, number of each shard's, 1 for a main replica,
        offsets of the shards of so many axes, in order)."""
        from megatron.core.dist_checkpointing.mapping import is_main_replica

        (groups, replicas), (number, replica, *tables) = unpack(self.data)
        main = np.array([is_main_replica(r) for r in replicas], dtype=np.int64)
        offsets = {table.shape[1]: table for table in tables}
        return groups, number, main[replica] if len(main) else replica, offsets

    def shards(self, keys: frozenset[str] | None = None) -> list[Any]:
        """megatron-core's objects, of some keys or all; tensors first, without data."""
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        (groups, replicas), (number, replica, *tables) = unpack(self.data)
        made = []
        rows = {table.shape[1]: iter(table.tolist()) for table in tables}
        for n, r in zip(number.tolist(), replica.tolist(), strict=True):
            key, *same = groups[n]
            values = dict(zip(_SAME, same, strict=True))
            offset = tuple(next(rows[len(values["global_shape"])]))
            if keys is None or key in keys:
                given = {"global_offset": offset, "replica_id": replicas[r], **values}
                made.append(ShardedTensor(key=key, data=None, **given))
        return [*made, *self.rest]


def pack(shards: Sequence[Any]) -> PackedShards:
    """The shards of a rank, without data, for sending."""
    groups: dict[tuple[Any, ...], int] = {}
    replicas: dict[Any, int] = {}
    numbers: list[int] = []
    replica_of: list[int] = []
    offsets: dict[int, list[tuple[int, ...]]] = {}
    rest = []
    for shard in shards:
        group = _group_of(shard)
        if group is None:
            rest.append(shard)
            continue
        numbers.append(groups.setdefault(group, len(groups)))
        replica_of.append(replicas.setdefault(shard.replica_id, len(replicas)))
        offsets.setdefault(len(shard.global_shape), []).append(shard.global_offset)
    tables = [as_array(rows, axes) for axes, rows in sorted(offsets.items())]
    columns = [np.array(numbers, np.int64), np.array(replica_of, np.int64), *tables]
    return PackedShards(pack_columns((list(groups), list(replicas)), columns), tuple(rest))


def _group_of(shard: Any) -> tuple[Any, ...] | None:
    """Key and what shards of a key have in common; None for an object, or a strange tensor."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    if type(shard) is not ShardedTensor or shard.data is not None:
        return None
    if shard.flattened_range is not None or len(shard.global_offset) != len(shard.global_shape):
        return None
    group = (shard.key, *(getattr(shard, name) for name in _SAME))
    if not all(isinstance(n, int) and 0 <= n < 1 << 63 for n in shard.global_offset):
        return None
    try:
        hash((group, shard.replica_id))
    except TypeError:
        return None
    return group


class GlobalShards(Sequence[list[Any]]):
    """The shards of all ranks; a rank's become objects when they are asked for.

    Attributes:
        is_sound: whether they passed megatron-core's check.
    """

    def __init__(self, ranks: Sequence[PackedShards], group: Any = None) -> None:
        self.ranks = list(ranks)
        self.group = group
        self.is_sound = False

    def __len__(self) -> int:
        return len(self.ranks)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [rank.shards() for rank in self.ranks[index]]
        return self.ranks[index].shards()

    def unproved(self) -> list[list[Any]]:
        """Per rank, the shards of keys that are not known to be sound, and all objects."""
        keys = frozenset(_unproved_keys(self.ranks))
        return [rank.shards(keys) if keys else list(rank.rest) for rank in self.ranks]


def _unproved_keys(ranks: Sequence[PackedShards]) -> set[str]:
    groups: dict[tuple[Any, ...], int] = {}
    held: dict[int, list[Ints]] = {}
    for rank in ranks:
        names, number, main, offsets = rank.columns()
        axes = np.array([len(group[3]) for group in names], dtype=np.int64)
        mine = np.array([groups.setdefault(group, len(groups)) for group in names], np.int64)
        for n, table in offsets.items():
            # One row a shard: its group, whether it is a main replica, its offset.
            at = axes[number] == n
            of = mine[number[at]]
            held.setdefault(n, []).append(np.column_stack((of, main[at], table)))
    by_key: dict[str, list[tuple[Any, ...]]] = {}
    for group in groups:
        by_key.setdefault(group[0], []).append(group)
    # A key that tensors and objects share is megatron-core's to judge.
    unproved = {shard.key for rank in ranks for shard in rank.rest} & by_key.keys()
    rows = {n: _by_group(np.concatenate(tables), len(groups)) for n, tables in held.items()}
    for key, variants in by_key.items():
        if not _is_sound(variants, groups, rows):
            unproved.add(key)
    return unproved


def _by_group(rows: Ints, groups: int) -> tuple[Ints, Ints]:
    """The rows of main replicas ordered by group, and where each group begins; the end last."""
    rows = rows[rows[:, 1] == 1]
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    return rows, np.searchsorted(rows[:, 0], np.arange(groups + 1))


def _is_sound(
    variants: list[tuple[Any, ...]],
    groups: dict[tuple[Any, ...], int],
    rows: dict[int, tuple[Ints, Ints]],
) -> bool:
    """Whether megatron-core's check surely passes the shards of a key.

    Of an irregular grid it asks for one dtype and one whole shape, and leaves the rest to torch.
    """
    if all(group[4] is None for group in variants):
        return len({(group[1], group[3]) for group in variants}) == 1
    if len(variants) > 1:
        return False
    _, _, local_shape, global_shape, grid, prepended, *_ = variants[0]
    axes = len(global_shape)
    if len(local_shape) + prepended != axes or len(grid) != axes or 0 in local_shape:
        return False
    table, first = rows[axes]
    number = groups[variants[0]]
    offsets = table[first[number] : first[number + 1], 2:]
    size = np.array((1,) * prepended + tuple(local_shape), dtype=np.int64)
    fragments = np.array(grid, dtype=np.int64)
    place = offsets // size
    if (offsets % size).any() or (place < 0).any() or (place >= fragments).any():
        return False
    total = int(np.prod(fragments.astype(object))) if axes else 1
    if len(place) != total:
        return False
    if axes == 0:
        return True
    order = np.lexsort(place.T[::-1])
    return not (place[order][1:] == place[order][:-1]).all(axis=1).any()


_last: dict[tuple[int, ...], tuple[bytes, GlobalShards]] = {}
"""What was gathered last, by group of ranks, and the digest of this rank's part of it."""


def gather(local: Sequence[Any], group: Any) -> GlobalShards:
    """Collective: the shards of all ranks. Sent again only when some rank's have changed."""
    import torch

    from vime_optim import collectives

    mine = pack(local)
    digest = hashlib.blake2b(pickle.dumps((mine.data, mine.rest)), digest_size=16).digest()
    key = tuple(torch.distributed.get_process_group_ranks(group))
    known = _last.get(key)
    changed = known is None or known[0] != digest
    if not collectives.highest([changed], group)[0]:
        assert known is not None
        return known[1]
    made = GlobalShards(collectives.gathered(mine, group), group)
    _last[key] = digest, made
    return made


def validate(original: Any, shards: GlobalShards, *args: Any, **kwargs: Any) -> None:
    """`validate_sharding_integrity`: megatron-core's check of what is not proved; on every rank.

    Raises:
        CheckpointError: on ranks whose own check passed, when that of another failed.
    """
    import torch

    from vime_optim.commit.agreement import agree, describe
    from vime_optim.errors import CheckpointError

    error: Exception | None = None
    try:
        rank0 = torch.distributed.get_rank() == 0
        left = shards.unproved() if rank0 and not shards.is_sound else []
        original(left, *args, **kwargs)
        shards.is_sound = True
    except Exception as caught:
        error = caught
    if shards.group is None:
        try:
            agree(
                None if error is None else describe(error)[:2000],
                "the shards of the ranks do not fit together",
                "the sharded state dict",
                None,
                CheckpointError,
                "do all ranks run the same model and parallel layout?",
            )
        except CheckpointError:
            _last.clear()
            if error is None:
                raise
    if error is not None:
        raise error

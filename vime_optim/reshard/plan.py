"""Plans of saves and loads: frozen, made from metadata alone, checked before anything is written.

Nothing here touches a tensor or talks to another rank. The engine exchanges digests and pieces and
hands them in; the checks raise PlanError with the key, the region and the ranks at fault.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from vime_optim.errors import PlanError
from vime_optim.files.cover import Fault, fault_of
from vime_optim.files.geometry import Box, boxes_of_range
from vime_optim.reshard.keys import KeyInfo, digest_of_keys

FORMAT_VERSION = 1
"""Raised whenever the keys, shapes or cuts that a plan gives for the same optimizer change."""


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """Where a piece lives on its rank.

    Attributes:
        param: name or key of the model parameter.
        state: name of the state, as "param", "exp_avg" or "exp_avg_sq".
        start_elem: position of the piece's first element in this rank's flat shard of that state.
    """

    param: str
    state: str
    start_elem: int


def is_main(replica_id: int | tuple[int, ...]) -> bool:
    """Whether a Megatron replica id marks the one copy that is written."""
    return replica_id == 0 if isinstance(replica_id, int) else not any(replica_id)


@dataclass(frozen=True, slots=True)
class Piece:
    """One box of a checkpoint tensor that a rank writes or reads.

    Attributes:
        key: the checkpoint key, as "optimizer.state.exp_avg.decoder.final_layernorm.weight".
        global_shape: shape of the whole tensor in the checkpoint, prepended axes included.
        offset: first index of the box along each axis of the global tensor.
        size: length of the box along each axis.
        numel: elements in the box.
        replica_id: Megatron's; a piece is written only where all of it is zero.
        source: the flat range of the rank's shard that holds these elements.
    """

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    numel: int
    replica_id: int | tuple[int, ...]
    source: ShardPlace

    @property
    def is_main_replica(self) -> bool:
        """Whether this copy is the one that is written."""
        return is_main(self.replica_id)


@dataclass(frozen=True, slots=True)
class RankPlan:
    """All that one rank writes, or reads.

    Attributes:
        rank: global rank.
        pieces: the boxes, main replicas and others. All are read; only main replicas are written.
        keys: every key of the rank's buffers, also those it holds no piece of, so that all ranks of
            one data-parallel group list the same ones.
        sharding_type: Megatron's name of the format.
        format_version: see FORMAT_VERSION.
    """

    rank: int
    pieces: tuple[Piece, ...]
    keys: tuple[KeyInfo, ...] = ()
    sharding_type: str = "fully_reshardable"
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True, slots=True)
class ParamRun:
    """Where a contiguous run of a local parameter lies in the checkpoint.

    Attributes:
        key: the checkpoint key.
        global_shape: shape of the whole tensor, prepended axes included.
        global_offset: where this run's first element lies in it, one index per axis.
        local_shape: shape of the run without the prepended axes (those have length one).
        flat_start: position of the run's first element in the flat local parameter. Not zero where
            a factory splits one parameter in several runs, as SwiGLU's gate and up halves.
        replica_id: Megatron's.
    """

    key: str
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    flat_start: int = 0
    replica_id: int | tuple[int, ...] = 0


def pieces_of_range(
    target: ParamRun,
    start: int,
    end: int,
    *,
    param: str,
    state: str,
    shard_start: int,
    key: str | None = None,
) -> Iterator[Piece]:
    """Cuts a rank's flat range of a parameter into the pieces that fall into one target.

    Args:
        target: the run of the parameter to cut; elements of the range outside it are left alone.
        start: first element of the rank's range in the flat local parameter.
        end: one past the last element of that range.
        param: name of the parameter, for ShardPlace.
        state: name of the state, for ShardPlace.
        shard_start: position in the rank's flat shard of the element at `start`.
        key: the checkpoint key, where it is not the target's own (a state's prefix is added).
    """
    first = max(start - target.flat_start, 0)
    last = min(end - target.flat_start, prod(target.local_shape))
    if first >= last:
        return
    prepended = len(target.global_shape) - len(target.local_shape)
    ones = (1,) * prepended
    head, tail = target.global_offset[:prepended], target.global_offset[prepended:]
    position = shard_start + target.flat_start + first - start
    for box in boxes_of_range(target.local_shape, first, last):
        numel = box.numel
        yield Piece(
            key=target.key if key is None else key,
            global_shape=target.global_shape,
            offset=head + box.moved(tail).offset,
            size=ones + box.size,
            numel=numel,
            replica_id=target.replica_id,
            source=ShardPlace(param, state, position),
        )
        position += numel


def check_local(plan: RankPlan) -> None:
    """Checks one rank's pieces: sound, within their tensors, and disjoint.

    Raises:
        PlanError: naming the key and the box.
    """
    for key, pieces in _by_key(plan.pieces).items():
        for piece in pieces:
            _check_piece(piece, pieces[0].global_shape, plan.rank)
        fault = fault_of(pieces, pieces[0].global_shape, full=False) if pieces[1:] else None
        if fault is not None:
            first, second = (pieces[index].source for index in fault.boxes)
            raise PlanError(
                "One rank holds the same elements twice",
                where=f"{key}, {fault}",
                got=f"{first} and {second}",
                expected="disjoint pieces",
                next_step="Two parameters share a checkpoint key; report the model",
                rank=plan.rank,
            )


def check_cover(
    pieces: Iterable[tuple[int, Piece]], global_shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Checks that the pieces of all ranks fill every tensor, each element exactly once.

    Pieces that are not the main replica are passed over. The time is close to linear in the pieces.

    Args:
        pieces: (rank, piece) of all ranks.
        global_shapes: the shape of every key that must be complete.

    Raises:
        PlanError: naming the key, the region, and the two ranks that overlap or that none holds it.
    """
    by_key: dict[str, list[tuple[int, Piece]]] = defaultdict(list)
    for rank, piece in pieces:
        if piece.is_main_replica:
            by_key[piece.key].append((rank, piece))
    for key in by_key.keys() - global_shapes.keys():
        raise PlanError(
            "A rank writes a key that no plan lists",
            where=key,
            got=f"rank {by_key[key][0][0]}",
            expected="a global shape for every key",
        )
    for key, shape in global_shapes.items():
        held = by_key.get(key, [])
        for rank, piece in held:
            _check_piece(piece, shape, rank)
        fault = fault_of([piece for _, piece in held], shape, full=True)
        if fault is not None:
            raise cover_error(key, shape, fault, [held[index][0] for index in fault.boxes])


def cover_error(key: str, shape: Sequence[int], fault: Fault, ranks: Sequence[int]) -> PlanError:
    """The PlanError for a gap (no ranks) or an overlap (two ranks) of a key."""
    return PlanError(
        "A tensor would be written twice in part" if ranks else "A tensor would be incomplete",
        where=f"{key}, {fault} of shape {tuple(shape)}",
        got=f"written by ranks {ranks[0]} and {ranks[1]}" if ranks else "written by no rank",
        expected="every element written by exactly one rank",
        next_step="Nothing was written. Do all ranks run the same model and parallel layout?",
    )


def wanted_exactly_once(
    plan: RankPlan, wanted: Mapping[tuple[str, str], Sequence[tuple[int, int]]]
) -> None:
    """Checks that the plan reads each wanted element of the rank's shards exactly once.

    Args:
        plan: one rank's pieces.
        wanted: (parameter, state) -> disjoint half-open ranges of the flat shard, in elements.

    Raises:
        PlanError: naming the parameter, the state and the range.
    """
    read: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for piece in plan.pieces:
        start = piece.source.start_elem
        read[piece.source.param, piece.source.state].append((start, start + piece.numel))
    for name in [*wanted, *(read.keys() - wanted.keys())]:
        fault = _compare_ranges(wanted.get(name, ()), read.get(name, ()))
        if fault is not None:
            what, start, end = fault
            raise PlanError(
                f"A load plan {what}",
                where=f"{name[0]} ({name[1]}), elements [{start}, {end}) of the rank's shard",
                expected="every wanted element read exactly once",
                next_step="Nothing was read. Report the model and its parallel layout",
                rank=plan.rank,
            )


def digest(plan: RankPlan) -> str:
    """16 hex digits over what all ranks of a group must share: keys, shapes, dtypes and format.

    The pieces, which differ from rank to rank, are left out.
    """
    return digest_of_keys(plan.keys, plan.sharding_type, plan.format_version)


def _by_key(pieces: Iterable[Piece]) -> dict[str, list[Piece]]:
    by_key: dict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        by_key[piece.key].append(piece)
    return by_key


def _check_piece(piece: Piece, shape: tuple[int, ...], rank: int) -> None:
    wrong = None
    if piece.global_shape != shape:
        wrong = f"global shape {piece.global_shape}"
    elif not Box(piece.offset, piece.size).is_within(shape) or 0 in piece.size:
        wrong = "an empty box, or one outside the tensor"
    elif piece.numel != prod(piece.size):
        wrong = f"numel {piece.numel} for size {piece.size}"
    elif piece.source.start_elem < 0:
        wrong = f"shard position {piece.source.start_elem}"
    if wrong is not None:
        raise PlanError(
            "A piece does not fit its tensor",
            where=f"{piece.key}, offset {piece.offset}, size {piece.size}",
            got=wrong,
            expected=f"a box of shape {shape}",
            next_step="Nothing was written. Report the model and its parallel layout",
            rank=rank,
        )


def _compare_ranges(
    wanted: Iterable[tuple[int, int]], read: Iterable[tuple[int, int]]
) -> tuple[str, int, int] | None:
    """First run of elements that is not read exactly as often as it is wanted (once or never)."""
    changes: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for column, ranges in enumerate((wanted, read)):
        for start, end in ranges:
            changes[start][column] += 1
            changes[end][column] -= 1
    need = have = 0
    for position, following in pairwise(sorted(changes)):
        need += changes[position][0]
        have += changes[position][1]
        if have > 1:
            return "reads a range twice", position, following
        if have != min(need, 1):
            what = "leaves a wanted range out" if need else "reads a range that is not wanted"
            return what, position, following
    return None

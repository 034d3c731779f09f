"""Plans of saves and loads: frozen, made from metadata alone, checked before anything is written.

Nothing here touches a tensor or talks to another rank. The engine exchanges digests and pieces and
hands them in; the checks raise PlanError with the key, the region and the ranks at fault.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from vime_optim.errors import PlanError
from vime_optim.files.cover import Fault, fault_of
from vime_optim.files.geometry import Box, boxes_of_range
from vime_optim.reshard.keys import KeyInfo


def is_main(replica_id: int | tuple[int, ...]) -> bool:
    """Whether a Megatron replica id marks the one copy that is written."""
    return replica_id == 0 if isinstance(replica_id, int) else not any(replica_id)


@dataclass(frozen=True, slots=True)
class Piece(Box):
    """One box of a checkpoint tensor that a rank writes or reads.

    Attributes:
        key: the checkpoint key, as "optimizer.state.exp_avg.decoder.final_layernorm.weight".
        global_shape: shape of the whole tensor in the checkpoint, prepended axes included.
        replica_id: Megatron's; a piece is written only where all of it is zero.
        param: name or key of the model parameter.
        state: name of the state, as "param", "exp_avg" or "exp_avg_sq".
        start_elem: position of the piece's first element in this rank's flat shard of that state.
    """

    key: str
    global_shape: tuple[int, ...]
    replica_id: int | tuple[int, ...]
    param: str
    state: str
    start_elem: int

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
    """

    rank: int
    pieces: tuple[Piece, ...]
    keys: tuple[KeyInfo, ...] = ()


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
    run: ParamRun, start: int, end: int, param: str, state: str, key: str | None = None
) -> Iterator[Piece]:
    """Cuts a rank's flat range of a parameter into the pieces that fall into one run.

    Args:
        run: the run of the parameter to cut; elements of the range outside it are left alone.
        start: first element of the rank's range in the flat local parameter.
        end: one past the last element of that range.
        param, state: as in Piece.
        key: the checkpoint key, where it is not the run's own (a state's prefix is added).
    """
    first = max(start - run.flat_start, 0)
    last = min(end - run.flat_start, prod(run.local_shape))
    if first >= last:
        return
    prepended = len(run.global_shape) - len(run.local_shape)
    head, tail = run.global_offset[:prepended], run.global_offset[prepended:]
    position = run.flat_start + first - start
    for box in boxes_of_range(run.local_shape, first, last):
        yield Piece(
            offset=head + box.moved(tail).offset,
            size=(1,) * prepended + box.size,
            key=key or run.key,
            global_shape=run.global_shape,
            replica_id=run.replica_id,
            param=param,
            state=state,
            start_elem=position,
        )
        position += box.numel


def check_local(plan: RankPlan) -> None:
    """Checks one rank's pieces: sound, within their tensors, and disjoint.

    Raises:
        PlanError: naming the key and the box.
    """
    by_key: dict[str, list[Piece]] = defaultdict(list)
    for piece in plan.pieces:
        by_key[piece.key].append(piece)
    for key, pieces in by_key.items():
        shape = pieces[0].global_shape
        for piece in pieces:
            _check_piece(piece, shape, plan.rank)
        fault = fault_of(pieces, shape, full=False) if pieces[1:] else None
        if fault is not None:
            first, second = (pieces[index] for index in fault.boxes)
            raise PlanError(
                "One rank holds the same elements twice",
                where=f"{key}, {fault}",
                got=f"{first.state} of {first.param} and {second.state} of {second.param}",
                expected="disjoint pieces",
                next_step="Two parameters share a checkpoint key; report the model",
                rank=plan.rank,
            )


def check_cover(
    key: str, global_shape: tuple[int, ...], pieces: Iterable[tuple[int, Piece]]
) -> None:
    """Checks that the pieces of all ranks fill a tensor, each element exactly once.

    Pieces that are not the main replica are passed over. The time is close to linear in the pieces.

    Args:
        pieces: (rank, piece) of all ranks.

    Raises:
        PlanError: naming the key, the region, and the two ranks that overlap or that none holds it.
    """
    held = [(rank, piece) for rank, piece in pieces if piece.is_main_replica]
    for rank, piece in held:
        _check_piece(piece, global_shape, rank)
    fault = fault_of([piece for _, piece in held], global_shape, full=True)
    if fault is not None:
        raise cover_error(key, global_shape, fault, [held[index][0] for index in fault.boxes])


def cover_error(key: str, shape: Sequence[int], fault: Fault, ranks: Sequence[int]) -> PlanError:
    """The PlanError for a gap (no ranks) or an overlap (two ranks) of a key."""
    return PlanError(
        "A tensor would be written twice in part" if ranks else "A tensor would be incomplete",
        where=f"{key}, {fault} of shape {tuple(shape)}",
        got=f"written by ranks {ranks[0]} and {ranks[1]}" if ranks else "written by no rank",
        expected="every element written by exactly one rank",
        next_step="Nothing was written. Do all ranks run the same model and parallel layout?",
    )


def _check_piece(piece: Piece, shape: tuple[int, ...], rank: int) -> None:
    wrong = None
    if piece.global_shape != shape:
        wrong = f"global shape {piece.global_shape}"
    elif not piece.is_within(shape) or 0 in piece.size:
        wrong = "an empty box, or one outside the tensor"
    if wrong is not None:
        raise PlanError(
            "A piece does not fit its tensor",
            where=f"{piece.key}, offset {piece.offset}, size {piece.size}",
            got=wrong,
            expected=f"a box of shape {shape}",
            next_step="Nothing was written. Report the model and its parallel layout",
            rank=rank,
        )

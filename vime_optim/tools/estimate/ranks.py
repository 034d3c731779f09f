"""Save and load on paper: bytes, boxes, files and memory of every rank, and a check of every plan.

Nothing is allocated but integers, and ranks are planned one after the other, so thousands of
simulated ranks of a large model fit a laptop. The plans are made by the same functions that the
engine uses.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from vime_optim.files.cover import find_fault
from vime_optim.reshard.keys import KeyInfo
from vime_optim.reshard.plan import (
    Piece,
    RankPlan,
    check_local,
    cover_error,
    pieces_of_range,
)
from vime_optim.tools.estimate.buffers import Buffer, Coordinates, ParallelLayout, build_buffer
from vime_optim.tools.estimate.shapes import ModelShape, model_params

STATES = ("param", "exp_avg", "exp_avg_sq")
STATE_ITEM_BYTES = 4  # the format stores each state in float32
FILES_PER_WRITER = 2  # writer threads of Megatron's torch_dist strategy; each writes one file


@dataclass(frozen=True, slots=True)
class StockCost:
    """What stock fully_reshardable costs one rank, beyond its own state.

    Attributes:
        host_bytes: peak host memory while the state dict is built.
        device_bytes: peak device memory of the gathers.
        received_bytes: what collectives deliver from other ranks.
        template_bytes: host memory of the tensors that a load reads into; also the bytes it reads
            where nothing shares the reading.
        tensors: entries of its state dict, all three states.
    """

    host_bytes: int
    device_bytes: int
    received_bytes: int
    template_bytes: int
    tensors: int


@dataclass(frozen=True, slots=True)
class RankEstimate:
    """One rank's share; boxes and bytes are those of all three states.

    Attributes:
        own_bytes: the rank's optimizer state, padding left out.
        padding_bytes: what padding adds to its shards.
        read_bytes: what a load reads: its own state, whoever wrote it.
        write_bytes: what a save writes; less than own_bytes where another TP rank or stage writes
            a replicated parameter.
        boxes: boxes read; `written_boxes` of them are written.
        files: files written.
        stock: what stock fully_reshardable costs here. Ours allocates and sends nothing.
        stock_write_bytes: what stock writes: all of a buffer on the first rank of its group and
            nothing on the others, unless Megatron's fully-parallel save spreads it.
        stock_files: files that stock writes, likewise.
    """

    rank: int
    own_bytes: int
    padding_bytes: int
    read_bytes: int
    write_bytes: int
    boxes: int
    written_boxes: int
    files: int
    stock: StockCost
    stock_write_bytes: int
    stock_files: int

    @property
    def figures(self) -> dict[str, int]:
        """All of it by name; what stock costs under `stock_...`."""
        known = {f.name: getattr(self, f.name) for f in fields(self)}
        stock = {f.name: getattr(self.stock, f.name) for f in fields(self.stock)}
        del known["rank"], known["stock"]
        return known | {f"stock_{name}": value for name, value in stock.items()}


@dataclass(slots=True)
class Spread:
    """Least, most and sum of a figure over ranks, without keeping them."""

    least: int = 0
    most: int = 0
    total: int = 0
    count: int = 0

    def add(self, value: int) -> None:
        """Takes one more rank's figure in."""
        self.least = value if self.count == 0 else min(self.least, value)
        self.most = max(self.most, value)
        self.total += value
        self.count += 1

    @property
    def mean(self) -> float:
        """Mean over the ranks; 0 where there are none."""
        return self.total / self.count if self.count else 0.0


@dataclass(slots=True)
class JobEstimate:
    """Figures of a whole job.

    Attributes:
        model_numel: parameters of the model, counted from the checkpoint's tensors.
        keys: checkpoint tensors of the optimizer, over all three states.
        figures: name -> Spread over the ranks, as in RankEstimate.figures.
        checked: whether every rank's plan was checked, and the cover over all ranks.
    """

    shape: ModelShape
    layout: ParallelLayout
    model_numel: int = 0
    keys: int = 0
    figures: dict[str, Spread] = field(default_factory=dict)
    checked: bool = False


class JobPlanner:
    """Plans the ranks of one job. Buffers are shared by the ranks of a data-parallel group."""

    def __init__(self, shape: ModelShape, layout: ParallelLayout) -> None:
        layout.split.check(shape)
        self.shape = shape
        self.layout = layout
        self._buffers: dict[tuple[object, ...], Buffer] = {}
        self._stock: dict[tuple[object, ...], StockCost] = {}

    def rank_buffers(self, at: Coordinates) -> tuple[tuple[Buffer, int], ...]:
        """(buffer, rank within its group) of a rank: the dense buffer, then the expert one."""
        dense = self._buffer(("dense", at.pp, at.tp), at)
        if self.layout.split.ep == 1:
            return ((dense, at.dp),)
        return ((dense, at.dp), (self._buffer(("expert", at.pp, at.etp, at.ep), at), at.edp))

    def _buffer(self, name: tuple[object, ...], at: Coordinates) -> Buffer:
        if name not in self._buffers:
            of_experts = name[0] == "expert"
            params = model_params(
                self.shape,
                self.layout.split,
                tp_rank=at.tp,
                pp_rank=at.pp,
                ep_rank=at.ep,
                etp_rank=at.etp,
            )
            self._buffers[name] = build_buffer(
                [param for param in params if param.is_expert == of_experts],
                self.layout.edp if of_experts else self.layout.dp_cp,
                self.layout.stage_bucket_numel(at.pp),
                high_busbw=self.layout.high_busbw,
            )
        return self._buffers[name]

    def rank_plan(self, rank: int, states: Sequence[str] = STATES) -> RankPlan:
        """One rank's boxes of the given states; what it writes are its main replicas."""
        pieces: list[Piece] = []
        keys: dict[KeyInfo, None] = {}
        for buffer, group_rank in self.rank_buffers(self.layout.coordinates(rank)):
            for param in buffer.params:
                for target in param.targets:
                    for state in states:
                        key = state_key(state, target.key)
                        keys[KeyInfo(key, target.global_shape)] = None
            for state in states:
                pieces.extend(_pieces(buffer, group_rank, state, prefixed=True))
        return RankPlan(rank, tuple(pieces), tuple(keys))

    def estimate(self, rank: int, check: CoverCheck | None = None) -> RankEstimate:
        """Figures of one rank. With `check`, also checks its plan and adds it to the cover.

        The three states are cut alike, so one stands for all.

        Raises:
            PlanError: the plan overlaps itself or leaves its tensors.
        """
        at = self.layout.coordinates(rank)
        pieces: list[Piece] = []
        shard_numel = own_numel = stock_numel = 0
        for buffer, group_rank in self.rank_buffers(at):
            shard_numel += buffer.numel // buffer.group_size
            stock_numel += buffer.stored_numel if group_rank == 0 else 0
            pieces.extend(_pieces(buffer, group_rank, STATES[0], prefixed=False))
            for _, start, end in buffer.owned(group_rank):
                own_numel += end - start
        if check is not None:
            plan = RankPlan(rank, tuple(pieces))
            check_local(plan)
            check.add(rank, pieces)
        written = [piece for piece in pieces if piece.is_main_replica]
        row_bytes = len(STATES) * STATE_ITEM_BYTES
        return RankEstimate(
            rank=rank,
            own_bytes=own_numel * row_bytes,
            padding_bytes=(shard_numel - own_numel) * row_bytes,
            read_bytes=sum(piece.numel for piece in pieces) * row_bytes,
            write_bytes=sum(piece.numel for piece in written) * row_bytes,
            boxes=len(pieces) * len(STATES),
            written_boxes=len(written) * len(STATES),
            files=min(FILES_PER_WRITER, len(written) * len(STATES)),
            stock=self._stock_cost(at),
            stock_write_bytes=stock_numel * row_bytes,
            stock_files=FILES_PER_WRITER if stock_numel else 0,
        )

    def _stock_cost(self, at: Coordinates) -> StockCost:
        name = (at.pp, at.tp, at.etp, at.ep)
        if name not in self._stock:
            self._stock[name] = stock_cost([[buffer] for buffer, _ in self.rank_buffers(at)])
        return self._stock[name]

    def global_shapes(self) -> dict[str, tuple[int, ...]]:
        """Checkpoint key, without the state's prefix -> shape; from the model, not from plans."""
        split = self.layout.split
        shapes: dict[str, tuple[int, ...]] = {}
        for stage in range(split.pp):
            for param in model_params(self.shape, split, pp_rank=stage):
                for target in param.targets:
                    shapes[target.key] = target.global_shape
        return shapes


class CoverCheck:
    """Gathers the main replicas' boxes of all ranks as integers, then checks that they cover."""

    def __init__(self) -> None:
        self._boxes: dict[str, array[int]] = {}

    def add(self, rank: int, pieces: Sequence[Piece]) -> None:
        """Takes one rank's pieces in; they are not kept."""
        for piece in pieces:
            if piece.is_main_replica:
                row = self._boxes.setdefault(piece.key, array("q"))
                row.append(rank)
                row.extend(piece.offset)
                row.extend(piece.size)

    def finish(self, global_shapes: dict[str, tuple[int, ...]]) -> None:
        """Checks every key.

        Raises:
            PlanError: naming the key, the region, and the ranks that overlap there, if any.
        """
        for key, shape in global_shapes.items():
            axes = len(shape)
            rows = np.array(self._boxes.get(key, array("q")), dtype=np.int64)
            rows = rows.reshape(-1, 1 + 2 * axes)
            lo, size = rows[:, 1 : 1 + axes], rows[:, 1 + axes :]
            fault = find_fault(lo, lo + size, shape, full=True)
            if fault is not None:
                raise cover_error(key, shape, fault, [int(rows[i, 0]) for i in fault.boxes])


def state_key(state: str, key: str) -> str:
    """The checkpoint key of one state of a parameter, as stock fully_reshardable names it."""
    return f"optimizer.state.{state}.{key}"


def _pieces(buffer: Buffer, group_rank: int, state: str, *, prefixed: bool) -> Iterator[Piece]:
    for param, start, end in buffer.owned(group_rank):
        for target in param.targets:
            yield from pieces_of_range(
                target,
                start,
                end,
                param=param.name,
                state=state,
                key=state_key(state, target.key) if prefixed else None,
            )


def stock_cost(optimizers: Sequence[Sequence[Buffer]]) -> StockCost:
    """Peak memory and traffic of stock fully_reshardable on one rank, by following its steps.

    Source: get_parameter_state_dp_zero of megatron-core 0.16.1, with return_on_all_ranks. World
    tensors stay until the save is over; a bucket's last gathered list and its concatenation stay
    until the next gather replaces them. NCCL's list all-gather doubles the device memory. For
    1.2 billion parameters at DP=2 this gives the 35.5 GB (host) and 11.8 GB (device) measured.

    Args:
        optimizers: the buffers of each distributed optimizer, in the order in which they are saved.
    """
    states, item = len(STATES), STATE_ITEM_BYTES
    world = host = device = received = 0
    for buffers in optimizers:
        listed = joined = shards = 0  # local variables of the call, from the round before
        for buffer in buffers:
            world += states * item * buffer.numel_unpadded
            host = max(host, world + shards + listed + joined)
            for bucket in buffer.buckets:
                bucket_bytes = item * (bucket.end - bucket.start)
                shard_bytes = bucket_bytes // buffer.group_size
                host = max(host, world + shards + states * shard_bytes + listed + joined)
                shards = states * shard_bytes
                device = max(device, 2 * bucket_bytes + shard_bytes)
                for _ in range(states):
                    # The old concatenation is alive while the new one is made from the new list.
                    host = max(host, world + shards + joined + 2 * bucket_bytes)
                    listed = joined = bucket_bytes
                    received += bucket_bytes - shard_bytes
    all_buffers = [buffer for buffers in optimizers for buffer in buffers]
    return StockCost(
        host_bytes=host,
        device_bytes=device,
        received_bytes=received,
        template_bytes=world,
        tensors=states * sum(len(p.targets) for buffer in all_buffers for p in buffer.params),
    )


def estimate_job(
    shape: ModelShape,
    layout: ParallelLayout,
    *,
    check: bool = True,
    on_rank: Callable[[RankEstimate], None] | None = None,
) -> JobEstimate:
    """Plans every rank of a job, one at a time.

    Args:
        shape: the model.
        layout: the job.
        check: whether to check each plan, and that all ranks together cover every tensor.
        on_rank: called after each rank.

    Raises:
        PlanError: the layout does not fit the model, or a plan is unsound.
    """
    planner = JobPlanner(shape, layout)
    shapes = planner.global_shapes()
    job = JobEstimate(shape, layout, keys=len(shapes) * len(STATES))
    job.model_numel = sum(int(np.prod(s, dtype=np.int64)) for s in shapes.values())
    cover = CoverCheck() if check else None
    for rank in range(layout.world_size):
        estimate = planner.estimate(rank, cover)
        for name, value in estimate.figures.items():
            job.figures.setdefault(name, Spread()).add(value)
        if on_rank is not None:
            on_rank(estimate)
    if cover is not None:
        cover.finish(shapes)
        job.checked = True
    return job

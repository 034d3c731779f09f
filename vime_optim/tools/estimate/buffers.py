"""Where Megatron's distributed optimizer puts parameters in its buffers: arithmetic, no buffers.

The rules are those of _ParamAndGradBuffer and DistributedDataParallel in megatron-core 0.16.1, and
the order of ranks is parallel_state's default (tp-cp-ep-dp-pp).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import lcm, prod

from vime_optim.errors import PlanError
from vime_optim.files.geometry import round_up
from vime_optim.reshard.plan import is_main
from vime_optim.tools.estimate.shapes import ModelParam, ModelSplit

PARAM_ALIGN_NUMEL = 64
BUCKET_ALIGN_NUMEL = 128
HIGH_BUSBW_ALIGN_NUMEL = 1 << 16


@dataclass(frozen=True, slots=True)
class Bucket:
    """A run of a buffer that is reduced and sharded on its own; positions in elements.

    Attributes:
        start: first element in the buffer.
        end: one past the last element, padding included; the length divides by the group's size.
        numel_unpadded: length without the padding at the end.
    """

    start: int
    end: int
    numel_unpadded: int


@dataclass(frozen=True, slots=True)
class Buffer:
    """All parameters of one kind on one rank, and their positions in elements.

    Attributes:
        params: in buffer order, which is the reverse of the order of registration.
        starts: first element of each parameter; ascending.
        ends: one past each parameter's last element.
        buckets: consecutive.
        group_size: ranks of the data-parallel group that shares the buffer.
    """

    params: tuple[ModelParam, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    group_size: int

    @property
    def numel(self) -> int:
        """Elements with padding."""
        return self.buckets[-1].end if self.buckets else 0

    @property
    def stored_numel(self) -> int:
        """Elements of the parameters that this rank's group writes: main replicas alone."""
        return sum(
            prod(target.local_shape)
            for param in self.params
            for target in param.targets
            if is_main(target.replica_id)
        )

    @property
    def numel_unpadded(self) -> int:
        """Elements as Megatron counts them: without the padding at the ends of buckets."""
        return sum(bucket.numel_unpadded for bucket in self.buckets)

    def owned(self, group_rank: int) -> Iterator[tuple[ModelParam, int, int]]:
        """(parameter, start, end) of each flat range of a parameter that a group rank owns."""
        for bucket in self.buckets:
            length = (bucket.end - bucket.start) // self.group_size
            first = bucket.start + group_rank * length
            last = first + length
            # The first parameter that ends after `first`; ends ascend as starts do.
            index = bisect_left(self.ends, first + 1)
            while index < len(self.params) and self.starts[index] < last:
                begin = self.starts[index]
                start, end = max(first, begin), min(last, self.ends[index])
                if start < end:
                    yield self.params[index], start - begin, end - begin
                index += 1


def build_buffer(
    params: Sequence[ModelParam],
    group_size: int,
    bucket_numel: int | None,
    *,
    high_busbw: bool = False,
) -> Buffer:
    """Places parameters, given in the order of registration, in a buffer.

    Args:
        params: parameters of one dtype and one data-parallel group.
        group_size: ranks of that group.
        bucket_numel: a bucket is closed once it is this long; None for one bucket.
        high_busbw: Megatron's pad_buckets_for_high_nccl_busbw.
    """
    align = lcm(group_size, BUCKET_ALIGN_NUMEL, HIGH_BUSBW_ALIGN_NUMEL if high_busbw else 1)
    starts: list[int] = []
    ends: list[int] = []
    buckets: list[Bucket] = []
    bucket_start = position = 0
    is_open = False

    def close(end: int) -> int:
        nonlocal bucket_start, is_open
        buckets.append(Bucket(bucket_start, round_up(end, align), end - bucket_start))
        bucket_start, is_open = buckets[-1].end, False
        return bucket_start

    for param in reversed(params):
        position = round_up(position, PARAM_ALIGN_NUMEL)
        if param.shared_embedding and is_open:
            position = close(position)
        starts.append(position)
        position += prod(param.local_shape)
        ends.append(position)
        is_open = True
        full = bucket_numel is not None and position - bucket_start >= bucket_numel
        if full or param.shared_embedding:
            position = close(position)
    if is_open:
        close(position)
    return Buffer(tuple(reversed(params)), tuple(starts), tuple(ends), tuple(buckets), group_size)


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where a rank stands in each group; `dp` counts context-parallel ranks too."""

    tp: int
    pp: int
    dp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """A job's parallel layout and its buckets.

    Attributes:
        world_size: number of ranks.
        split: tensor, pipeline, expert and expert-tensor parallel sizes.
        cp: context-parallel size; its ranks share the optimizer state like data-parallel ones.
        overlap: Megatron's overlap_grad_reduce; without it a buffer is one bucket.
        bucket_numel: bucket size under overlap; Megatron's default where None.
        high_busbw: Megatron's pad_buckets_for_high_nccl_busbw.
    """

    world_size: int
    split: ModelSplit = field(default_factory=ModelSplit)
    cp: int = 1
    overlap: bool = False
    bucket_numel: int | None = None
    high_busbw: bool = False

    def __post_init__(self) -> None:
        s = self.split
        for what, parts in (
            ("TP x PP x CP", s.tp * s.pp * self.cp),
            ("ETP x EP x PP", s.etp * s.ep * s.pp),
        ):
            if parts < 1 or self.world_size < 1 or self.world_size % parts:
                raise PlanError(
                    f"The world size does not divide by {what}",
                    got=f"{self.world_size} ranks over {parts}",
                    expected="a multiple",
                )

    @property
    def dp_cp(self) -> int:
        """Ranks that share a dense buffer."""
        return self.world_size // (self.split.tp * self.split.pp)

    @property
    def edp(self) -> int:
        """Ranks that share an expert buffer."""
        return self.world_size // (self.split.etp * self.split.ep * self.split.pp)

    def coordinates(self, rank: int) -> Coordinates:
        """A rank's place in each group, in parallel_state's default order."""
        s = self.split
        pp, inner = divmod(rank, self.world_size // s.pp)
        dp, tp = divmod(inner, s.tp)
        rest, etp = divmod(inner, s.etp)
        edp, ep = divmod(rest, s.ep)
        return Coordinates(tp, pp, dp, etp, ep, edp)

    def stage_bucket_numel(self, pp_rank: int) -> int | None:
        """Bucket size of a pipeline stage; later stages than the first use one bucket."""
        if not self.overlap or pp_rank > 0:
            return None
        if self.bucket_numel is not None:
            return self.bucket_numel
        return max(40_000_000, 1_000_000 * (self.dp_cp // self.cp))

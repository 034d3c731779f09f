"""Coded states are read one shard at a time: whole, in place, and never from what is not there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from vime_optim.errors import PlanError
from vime_optim.files.filling import Source
from vime_optim.reshard.coded import CodedShard, Read, load_shards, shard_of, with_memory

CPU = torch.device("cpu")
NUMEL = 24


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, torch.Tensor]:
    """A file of 24 float32 elements, and these."""
    value = torch.arange(1.0, NUMEL + 1)
    path = tmp_path / "file"
    path.write_bytes(value.numpy().tobytes())
    return path, value


def read_of(path: Path, start: int, end: int) -> Read:
    """Elements [start, end) of the file, to the same place of the shard."""
    source = Source(str(path), "exp_avg.w", torch.float32, 0, (NUMEL,), (start,), (end - start,))
    return Read(source, (end - start,), (1,), start)


def load(shard: CodedShard) -> list[torch.Tensor]:
    taken: list[torch.Tensor] = []
    load_shards([(shard, CPU, lambda value: taken.append(value.clone()))])
    return taken


@pytest.mark.parametrize("borders", [(0, 24), (0, 5, 24), (0, 1, 23, 24)])
def test_a_shard_is_put_together_from_its_reads(
    borders: Sequence[int], stored: tuple[Path, torch.Tensor]
) -> None:
    path, value = stored
    shard = CodedShard(NUMEL, may_be_partial=False)
    shard.reads = [read_of(path, a, b) for a, b in pairwise(borders)][::-1]
    (got,) = load(shard)
    assert torch.equal(got, value)
    assert shard.buffer is None


@pytest.mark.parametrize(
    "ranges", [[(0, 23)], [(1, 24)], [(0, 7), (8, 24)], [], [(0, 8), (4, 8), (12, 24)]]
)
def test_a_shard_that_was_not_read_whole_is_refused(
    ranges: list[tuple[int, int]], stored: tuple[Path, torch.Tensor]
) -> None:
    """Memory that was never written to must not become a moment."""
    shard = CodedShard(NUMEL, may_be_partial=False)
    shard.reads = [read_of(stored[0], *span) for span in ranges]
    with pytest.raises(PlanError, match="not loaded whole") as caught:
        load(shard)
    assert caught.value.got == f"{sum(b - a for a, b in ranges)} elements"
    assert caught.value.expected == f"{NUMEL} elements, each once"


def test_what_a_padded_vocabulary_lacks_is_zero(stored: tuple[Path, torch.Tensor]) -> None:
    path, value = stored
    full = CodedShard(NUMEL, may_be_partial=False)
    full.reads = [read_of(path, 0, NUMEL)]
    partial = CodedShard(NUMEL, may_be_partial=True)
    partial.reads = [read_of(path, 4, 20)]
    taken: list[torch.Tensor] = []
    # One buffer serves both, so the second would find the elements of the first.
    load_shards([(s, CPU, lambda value: taken.append(value.clone())) for s in (full, partial)])
    assert torch.equal(taken[0], value)
    assert torch.equal(taken[1][4:20], value[4:20])
    assert not taken[1][:4].any()
    assert not taken[1][20:].any()


def test_a_gap_that_a_double_read_makes_up_for_is_zero_in_a_padded_vocabulary(
    stored: tuple[Path, torch.Tensor],
) -> None:
    """As many elements as the shard has, and yet not all of them."""
    path, value = stored
    full, partial = (CodedShard(NUMEL, may_be_partial=it) for it in (False, True))
    full.reads = [read_of(path, 0, NUMEL)]
    partial.reads = [read_of(path, *span) for span in ((0, 12), (8, 12), (16, 24))]
    taken: list[torch.Tensor] = []
    load_shards([(s, CPU, lambda value: taken.append(value.clone())) for s in (full, partial)])
    assert torch.equal(taken[1][:12], value[:12])
    assert not taken[1][12:16].any()


def test_columns_fill_a_shard(stored: tuple[Path, torch.Tensor]) -> None:
    """Boxes that are not contiguous in the shard, as a tensor-parallel resharding makes them."""
    path, value = stored
    shard = CodedShard(NUMEL, may_be_partial=False)
    for first, width in ((0, 2), (2, 4)):
        box = (str(path), "exp_avg.w", torch.float32, 0, (4, 6), (0, first), (4, width))
        shard.reads.append(Read(Source(*box), (4, width), (6, 1), first))
    (got,) = load(shard)
    assert torch.equal(got, value)


def test_a_shard_with_memory_of_its_own_is_handed_over_as_it_is() -> None:
    """Another rank, or another reader, filled the buffer: there is nothing to read."""
    shard = CodedShard(NUMEL, may_be_partial=False)
    rows = shard.placeholder.view(4, 6)[1:3]
    assert shard_of(rows) is shard
    real = with_memory(object(), rows)
    assert (real.shape, real.device.type) == ((2, 6), "cpu")
    real.fill_(5.0)
    shard.real(shard.placeholder[:6]).fill_(4.0)
    shard.real(shard.placeholder[18:]).fill_(6.0)
    (got,) = load(shard)
    assert got.tolist() == [4.0] * 6 + [5.0] * 12 + [6.0] * 6
    assert shard.buffer is None

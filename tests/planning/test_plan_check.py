"""Our check of a global plan gives torch's verdict, on boxes of every kind."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from vime_optim.files import cover
from vime_optim.fixes import planning as fix
from vime_optim.planning import global_check
from vime_optim.registry import around

PROPERTIES = TensorProperties(dtype=torch.float32)


def plans_of(shape, pieces, ranks):
    """Each rank's plan: `pieces` are (rank, offset, size) of the key "w"."""
    plans = [SavePlan([]) for _ in range(ranks)]
    for rank, offset, size in pieces:
        chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(size))
        index = MetadataIndex("w", chunk.offsets)
        data = TensorWriteData(chunk, PROPERTIES, torch.Size(shape))
        plans[rank].items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    return plans


def metadata_of(plans):
    return default_planner.create_default_global_save_plan(plans)[1]


def errors_of_torch(plans, metadata):
    """Whether torch's own check finds a fault: a list of them in new releases, True for none."""
    answer = default_planner._validate_global_plan(plans, metadata)
    return bool(answer) if isinstance(answer, list) else not answer


def all_pairs(global_plan, metadata):
    """What torch up to 2.9 does: all pairs, and a bool."""
    for value in metadata.state_dict_metadata.values():
        if isinstance(value, BytesStorageMetadata) or not value.size:
            continue
        volume = 0
        for index, chunk in enumerate(value.chunks):
            if not default_planner._check_box_bounds(value.size, chunk):
                return False
            volume += math.prod(chunk.sizes)
            for other in value.chunks[index + 1 :]:
                if default_planner._check_box_overlap(chunk, other):
                    return False
        several = len(global_plan) > 1 or global_check._a_single_plan_must_be_whole()
        if several and volume != math.prod(value.size):
            return False
    return True


@st.composite
def cut_tensors(draw):
    """A tensor cut along planes again and again, so that most of them are sound."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    pieces = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 12))):
        number = draw(st.integers(0, len(pieces) - 1))
        axis = draw(st.integers(0, len(shape) - 1))
        offset, size = pieces.pop(number)
        at = draw(st.integers(0, size[axis]))
        for start, length in ((0, at), (at, size[axis] - at)):
            piece = list(offset), list(size)
            piece[0][axis] += start
            piece[1][axis] = length
            if length or draw(st.integers(0, 9)) == 0:
                pieces.append((tuple(piece[0]), tuple(piece[1])))
    return shape, pieces


@st.composite
def any_tensors(draw):
    """Boxes anywhere, out of bounds too."""
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=3)))
    pieces = []
    for _ in range(draw(st.integers(0, 7))):
        offset = tuple(draw(st.integers(-1 if draw(st.booleans()) else 0, 5)) for _ in shape)
        size = tuple(draw(st.integers(0, 4)) for _ in shape)
        pieces.append((offset, size))
    return shape, pieces


@settings(max_examples=150, deadline=None)
@given(st.one_of(cut_tensors(), any_tensors()), st.integers(1, 3), st.data())
def test_verdicts_are_torchs(tensor, ranks, data):
    shape, pieces = tensor
    if len(pieces) > 1 and data.draw(st.booleans()):
        pieces = data.draw(st.permutations(pieces))
        change = data.draw(st.sampled_from(["none", "drop", "twice", "grow"]))
        if change == "drop":
            pieces = pieces[1:]
        elif change == "twice":
            pieces = [*pieces, pieces[0]]
        elif change == "grow":
            offset, size = pieces[0]
            pieces = [(offset, (size[0] + 1, *size[1:])), *pieces[1:]]
    held = [(data.draw(st.integers(0, ranks - 1)), *piece) for piece in pieces]
    plans = plans_of(shape, held, ranks)
    metadata = metadata_of(plans)
    theirs = errors_of_torch(plans, metadata)
    verdict = global_check.check(plans, metadata.state_dict_metadata)
    assert not verdict.unproved
    assert (not verdict.faults) == (not theirs) == all_pairs(plans, metadata)


@settings(max_examples=60, deadline=None)
@given(any_tensors())
def test_replacement_answers_as_torch_does(tensor):
    shape, pieces = tensor
    plans = plans_of(shape, [(i % 2, *piece) for i, piece in enumerate(pieces)], 2)
    metadata = metadata_of(plans)
    new = around(fix._validate_global_plan)(default_planner._validate_global_plan, lambda: None)
    old = around(fix._validate_global_plan)(old_validate, lambda: None)
    theirs = errors_of_torch(plans, metadata)
    answer = default_planner._validate_global_plan(plans, metadata)
    assert type(new(plans, metadata)) is type(answer)
    assert bool(new(plans, metadata)) == bool(answer)
    assert old(plans, metadata) is (not theirs)


def old_validate(global_plan, metadata):
    all_good = all_pairs(global_plan, metadata)
    return all_good


def test_messages_name_key_ranks_and_boxes():
    shape = (4, 6)
    pieces = [(0, (0, 0), (2, 6)), (1, (2, 0), (2, 4)), (2, (2, 3), (2, 3))]
    plans = plans_of(shape, pieces, 3)
    (overlap,) = (f for f in check(plans).faults if "overlapping" in f)
    assert overlap == (
        "key:w has overlapping chunks: offset [2, 0] size [2, 4] offset [2, 3] size [2, 3]"
        " (ranks 1 and 2)"
    )
    plans = plans_of(shape, [*pieces[:2], (2, (2, 4), (2, 3))], 3)
    (bounds,) = (f for f in check(plans).faults if "bounds" in f)
    assert bounds == (
        "key:w has out of bounds chunk: tensor-size:[4, 6]"
        " chunk: offset [2, 4] size [2, 3] (rank 2)"
    )
    (gap,) = check(plans_of(shape, pieces[:2], 3)).faults
    assert gap == "key:w invalid fill tensor-volume: 24 chunks-volume: 20"


def check(plans):
    return global_check.check(plans, metadata_of(plans).state_dict_metadata)


def test_what_is_strange_goes_to_torch():
    plans = plans_of((4,), [(0, (0,), (4,))], 1)
    metadata = metadata_of(plans)
    chunk = ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((1, 1)))
    metadata.state_dict_metadata["odd"] = TensorStorageMetadata(
        PROPERTIES, torch.Size((4,)), [chunk]
    )
    metadata.state_dict_metadata["scalar"] = TensorStorageMetadata(
        PROPERTIES, torch.Size(()), [ChunkStorageMetadata(torch.Size(()), torch.Size(()))]
    )
    verdict = global_check.check(plans, metadata.state_dict_metadata)
    assert set(verdict.unproved) >= {"odd", "scalar"}
    assert not verdict.faults
    asked = []

    def validate(global_plan, rest):
        asked.append(set(rest.state_dict_metadata))
        all_good = False
        return all_good

    assert around(fix._validate_global_plan)(validate, lambda: None)(plans, metadata) is False
    assert asked == [set(verdict.unproved)]


def stacked(layers, experts, rows, columns):
    """Boxes of a stacked expert weight whose two halves are stored apart."""
    grid = np.stack(np.meshgrid(*map(np.arange, (layers, experts, 2)), indexing="ij"), -1)
    grid = grid.reshape(-1, 3)
    zeros = np.zeros(len(grid), dtype=np.int64)
    lo = np.stack((grid[:, 0], grid[:, 1], grid[:, 2] * rows, zeros), 1)
    return lo, lo + np.array((1, 1, rows, columns))


def test_chunks_that_all_span_the_longest_axis():
    """24,064 chunks of one stacked key, the experts of Qwen3-235B-A22B: pairs would be 3e8."""
    lo, hi = stacked(94, 128, 1536, 4096)
    shape = (94, 128, 3072, 4096)
    pieces = [
        (n % 64, tuple(a), tuple(b))
        for n, (a, b) in enumerate(zip(lo.tolist(), (hi - lo).tolist(), strict=True))
    ]
    plans = plans_of(shape, pieces, 64)
    metadata = metadata_of(plans)
    # torch takes minutes, as a check of pairs would here: pytest's limit for a test ends that.
    assert global_check.check(plans, metadata.state_dict_metadata) == global_check.PlanVerdict()
    chunks = metadata.state_dict_metadata["w"].chunks
    chunks[777] = replace(chunks[777], offsets=chunks[778].offsets)
    faults = global_check.check(plans, metadata.state_dict_metadata).faults
    assert len(faults) == 1
    assert "overlapping" in faults[0]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_overlapping_pairs_against_all_pairs(data):
    axes = data.draw(st.integers(1, 3))

    def draw(most):
        lo = data.draw(st.lists(st.tuples(*[st.integers(0, 6)] * axes), max_size=most))
        size = [data.draw(st.tuples(*[st.integers(0, 4)] * axes)) for _ in lo]
        a, b = (np.array(x, dtype=np.int64).reshape(-1, axes) for x in (lo, size))
        return a, a + b

    (a_lo, a_hi), (b_lo, b_hi) = draw(6), draw(40)
    both = (a_lo[:, None] < b_hi) & (b_lo < a_hi[:, None])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cover, "_FEW_SAVED", data.draw(st.integers(0, 3)))
        patch.setattr(cover, "_PAIRS_AT_ONCE", data.draw(st.integers(1, 50)))
        pairs = cover.overlapping_pairs(a_lo, a_hi, b_lo, b_hi)
    assert np.array_equal(np.stack(pairs, 1), np.argwhere(both.all(axis=2)))


def test_coordinates_beyond_63_bits_are_refused_not_guessed():
    huge = [(0, (0,), (2**62,)), (1, (2**62,), (2**62,))]
    assert check(plans_of((2**63 - 1,), huge, 2)).unproved == ["w"]

"""Plans that were sent as columns, and what is made of them, equal torch's own."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from tests.planning.test_plan_check import errors_of_torch
from vime_optim.planning import packed
from vime_optim.planning.save_plans import PackedPlan, pack_plan
from vime_optim.planning.whole import make_whole

SHAPES = {"a": (4, 6), "b": (4, 6), "c": (8,), "d": (2, 3, 4), "scalar": ()}


def tensor_item(key, offset, size, hint=None, shape=None):
    chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(size))
    whole = torch.Size(shape or SHAPES[key])
    data = TensorWriteData(chunk, TensorProperties(dtype=torch.float16), whole)
    place = MetadataIndex(key, chunk.offsets, hint)
    return WriteItem(place, WriteItemType.SHARD, tensor_data=data)


def object_item(key):
    return WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)


@st.composite
def plans(draw):
    ranks = []
    for rank in range(draw(st.integers(1, 4))):
        items = []
        for _ in range(draw(st.integers(0, 6))):
            key = draw(st.sampled_from(sorted(SHAPES)))
            offset = tuple(draw(st.integers(0, n - 1)) for n in SHAPES[key])
            size = tuple(draw(st.integers(0, 3)) for _ in offset)
            items.append(tensor_item(key, offset, size, draw(st.sampled_from([None, 0, 3]))))
        for number in range(draw(st.integers(0, 2))):
            items.append(object_item(f"o{number}/shard_{rank if draw(st.booleans()) else 0}"))
        ranks.append(SavePlan(draw(st.permutations(items))))
    return ranks


def sent(plan):
    return PackedPlan(packed.Boxes.from_bytes(pack_plan(plan).to_bytes()))


def hints(plan):
    return [item.index.index for item in plan.items]


@settings(max_examples=150, deadline=None)
@given(plans())
def test_what_is_made_is_torchs(ranks):
    received = [sent(plan) for plan in ranks]
    whole = make_whole(received)
    for plan, other in zip(ranks, received, strict=True):
        assert plan.items == other.items
        assert hints(plan) == hints(other)
        copy = pickle.loads(pickle.dumps(other))
        assert type(copy) is SavePlan
        assert copy == plan
    names = [(item.index.fqn, item.index.offset) for plan in ranks for item in plan.items]
    if whole is None or not whole.plans:
        assert len(set(names)) < len(names)
        return
    assert len(set(names)) == len(names)
    theirs, metadata = default_planner.create_default_global_save_plan(dedup_save_plans(ranks))
    assert list(whole.state_dict_metadata) == list(metadata.state_dict_metadata)
    assert whole.metadata() == metadata
    for plan, other in zip(theirs, whole.plans, strict=True):
        assert plan.items == other.items
        assert hints(plan) == hints(other)
    assert bool(whole.verdict.faults) == errors_of_torch(theirs, metadata)
    assert set(whole.verdict.unproved) <= {"scalar"}


def test_shapes_that_ranks_disagree_on_are_left_to_torch():
    one, other = tensor_item("c", (0,), (4,)), tensor_item("c", (4,), (4,), shape=(9,))
    assert make_whole([sent(SavePlan([one])), sent(SavePlan([other]))]) is None


@pytest.mark.parametrize("what", ["planner_data", "storage_data", "type", "offset"])
def test_a_plan_with_more_to_it_is_not_packed(what):
    item = tensor_item("c", (0,), (4,))
    plan = SavePlan([item])
    if what == "offset":
        plan.items[0] = WriteItem(MetadataIndex("c", (1,)), item.type, tensor_data=item.tensor_data)
    elif what == "type":
        plan.items[0] = WriteItem(item.index, WriteItemType.TENSOR, tensor_data=item.tensor_data)
    else:
        plan = SavePlan([item], **{what: {"x": 1}})
    assert pack_plan(plan) is None


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_integers_of_every_width_come_back(values):
    array = np.array(values, dtype=np.int64)
    constants, (same,) = packed.unpack(packed.pack(("x",), [array]))
    assert constants == ("x",)
    assert np.array_equal(same, array)


def test_two_sizes_at_one_offset_are_refused_though_torch_keeps_either():
    ranks = [
        SavePlan([tensor_item("c", (0,), (3,))]),
        SavePlan([tensor_item("c", (0,), (8,))]),
    ]
    whole = make_whole([sent(plan) for plan in ranks])
    assert "offset [0] size [3] offset [0] size [8] (ranks 0 and 1)" in whole.verdict.faults[0]

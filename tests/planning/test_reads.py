"""Read items are torch's, whatever the chunks are."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from vime_optim.planning import reads


def chunk_of(offset, size):
    return ChunkStorageMetadata(torch.Size(offset), torch.Size(size))


def never(*args):
    raise AssertionError("torch's own way was taken")


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_items_are_torchs(data):
    axes = data.draw(st.integers(1, 3))
    index = st.tuples(*[st.integers(0, 7)] * axes)
    length = st.tuples(*[st.integers(0, 4)] * axes)
    saved = [
        chunk_of(*data.draw(st.tuples(index, length)))
        for _ in range(data.draw(st.integers(17, 40)))
    ]
    local = [
        chunk_of(*data.draw(st.tuples(index, length)))
        for _ in range(data.draw(st.integers(16, 20)))
    ]
    md = TensorStorageMetadata(TensorProperties(), torch.Size([12] * axes), saved)
    theirs = create_read_items_for_chunk_list("w", md, local)
    ours = reads.create_read_items(never, "w", md, local)

    def order(item):
        return item.dest_index.index, item.storage_index.index

    assert ours == sorted(theirs, key=order)


def test_few_chunks_and_strange_ones_go_to_torch():
    md = TensorStorageMetadata(TensorProperties(), torch.Size([4]), [chunk_of((0,), (4,))])
    asked = []

    def original(*args):
        asked.append(args)
        return ["theirs"]

    few = [chunk_of((0,), (2,))]
    assert reads.create_read_items(original, "w", md, few) == ["theirs"]
    odd = [chunk_of((0, 0), (1, 1))] * 300
    assert reads.create_read_items(original, "w", md, odd) == ["theirs"]
    scalars = TensorStorageMetadata(TensorProperties(), torch.Size([]), [chunk_of((), ())] * 20)
    assert reads.create_read_items(original, "w", scalars, [chunk_of((), ())] * 20) == ["theirs"]
    assert len(asked) == 3

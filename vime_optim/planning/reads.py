"""What a rank must read for which chunk, found by planes, not by trying all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vime_optim.files import cover
from vime_optim.files.cover import Ints

_SMALL = 256
"""Below this many pairs of chunks torch's own way is as fast."""

Original = Callable[[str, Any, Sequence[Any]], list[Any]]


def create_read_items(
    original: Original, fqn: str, checkpoint_md: Any, local_chunks: Sequence[Any]
) -> list[Any]:
    """torch's `create_read_items_for_chunk_list`: the same items, ordered by local and then by
    saved chunk. Small or strange lists of chunks go to torch.

    Args:
        fqn: the key.
        checkpoint_md: the key's TensorStorageMetadata.
        local_chunks: ChunkStorageMetadata of what this rank wants.
    """
    saved_chunks = checkpoint_md.chunks
    if len(saved_chunks) * len(local_chunks) <= _SMALL:
        return original(fqn, checkpoint_md, local_chunks)
    try:
        axes = len(local_chunks[0].offsets)
        lo, size = _arrays(local_chunks, axes)
        saved_lo, saved_size = _arrays(saved_chunks, axes)
        if axes == 0 or min(int(a.min()) for a in (lo, size, saved_lo, saved_size)) < 0:
            return original(fqn, checkpoint_md, local_chunks)
        one, other = cover.overlapping_pairs(lo, lo + size, saved_lo, saved_lo + saved_size)
    except (ValueError, OverflowError, TypeError):
        return original(fqn, checkpoint_md, local_chunks)
    start = np.maximum(lo[one], saved_lo[other])
    end = np.minimum(lo[one] + size[one], saved_lo[other] + saved_size[other])
    return _items(
        fqn,
        local_chunks,
        saved_chunks,
        list(zip(one.tolist(), other.tolist(), strict=True)),
        (start - lo[one]).tolist(),
        (start - saved_lo[other]).tolist(),
        (end - start).tolist(),
    )


def _arrays(chunks: Sequence[Any], axes: int) -> tuple[Ints, Ints]:
    return (
        cover.as_array([chunk.offsets for chunk in chunks], axes),
        cover.as_array([chunk.sizes for chunk in chunks], axes),
    )


def _items(
    fqn: str,
    local_chunks: Sequence[Any],
    saved_chunks: Sequence[Any],
    pairs: list[tuple[int, int]],
    dest_offsets: list[list[int]],
    storage_offsets: list[list[int]],
    lengths: list[list[int]],
) -> list[Any]:
    import torch
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

    return [
        ReadItem(
            type=LoadItemType.TENSOR,
            dest_index=MetadataIndex(fqn, local_chunks[one].offsets, one),
            dest_offsets=torch.Size(dest),
            storage_index=MetadataIndex(fqn, saved_chunks[other].offsets, other),
            storage_offsets=torch.Size(storage),
            lengths=torch.Size(length),
        )
        for (one, other), dest, storage, length in zip(
            pairs, dest_offsets, storage_offsets, lengths, strict=True
        )
    ]

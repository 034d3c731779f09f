"""Coded states (float16, float8, the 16 low bits of a master) are loaded one shard at a time.

What such a state needs to be read into is float32 and twice its own size, so there must never be
much of it. A load template therefore holds placeholders without memory. While DCP reads, it is only
noted which boxes of which files belong to a placeholder; they are read when the optimizer takes its
state: one shard, encoded at once, then the next. By then the model's parameters are loaded, whose
bits are the other half of a master that is kept as a remainder.

Where something else than our reader fills a template, a placeholder gets memory of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vime_optim.errors import PlanError
from vime_optim.files.filling import Source
from vime_optim.files.geometry import combs, whole
from vime_optim.files.reading import BoxReader

_DEFERS = "_vime_optim_defers"


@dataclass(frozen=True, slots=True)
class Read:
    """A box in a file and its place in the flat shard (size, strides and offset in elements)."""

    source: Source
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class CodedShard:
    """The float32 value of one coded state of one parameter shard, while it is loaded.

    Attributes:
        placeholder: stands for the value, 1-D float32, on the meta device.
        buffer: the value on the host, where it had to be given memory; else None.
        reads: what is to be read into the value.
        may_be_partial: the checkpoint may lack elements, which are zero then (a padded vocabulary).
        may_be_absent: the checkpoint may lack all of it, and the state stays as it is then.
    """

    def __init__(self, numel: int, may_be_partial: bool) -> None:
        self.placeholder = torch.empty(numel, dtype=torch.float32, device="meta")
        self.buffer: torch.Tensor | None = None
        self.reads: list[Read] = []
        self.may_be_partial = may_be_partial
        self.may_be_absent = False
        _SHARDS[self.placeholder.untyped_storage()._cdata] = self

    @property
    def numel(self) -> int:
        return self.placeholder.numel()

    def real(self, view: torch.Tensor) -> torch.Tensor:
        """The part of the buffer that `view`, a view of the placeholder, stands for."""
        if self.buffer is None:
            make = torch.zeros if self.may_be_partial else torch.empty
            self.buffer = make(self.numel, dtype=torch.float32, device="cpu")
        return self.buffer.as_strided(view.size(), view.stride(), view.storage_offset())

    def read_into(self, boxes: BoxReader, flat: torch.Tensor) -> None:
        """Read what was noted into `flat`, the buffer or other memory of the shard's size.

        Raises:
            PlanError: part of the value is neither in the buffer nor among the reads.
            CheckpointError: a file cannot be read.
        """
        if self.buffer is None and not _fill_once(self.reads, self.numel):
            if not self.may_be_partial:
                found = sum(read.source.numel for read in self.reads)
                raise PlanError(
                    "a coded optimizer state was not loaded whole",
                    where=self.reads[0].source.key if self.reads else None,
                    got=f"{found} elements",
                    expected=f"{self.numel} elements, each once",
                    next_step="check the checkpoint with `vime-optim inspect`",
                )
            flat.zero_()
        for read in sorted(self.reads, key=_position):
            view = flat.as_strided(read.size, read.stride, flat.storage_offset() + read.offset)
            boxes.read(read.source, view)
        boxes.drain()

    def release(self) -> None:
        """Give the memory back. What was loaded may be taken again: the reads stay noted."""
        self.buffer = None

    @property
    def is_absent(self) -> bool:
        return self.may_be_absent and self.buffer is None and not self.reads


# By the identity of the placeholder's storage, which every view of it shares.
_SHARDS: weakref.WeakValueDictionary[int, CodedShard] = weakref.WeakValueDictionary()


def _fill_once(reads: list[Read], numel: int) -> bool:
    """Whether the reads write each of a shard's `numel` elements exactly once."""
    starts, lengths = [], []
    for read in reads:
        for comb in combs(read.stride, whole(read.size)):
            starts.append(read.offset + comb.start + comb.step * np.arange(comb.count))
            lengths.append(np.full(comb.count, comb.run))
    if not starts:
        return numel == 0
    start, length = np.concatenate(starts), np.concatenate(lengths)
    order = np.argsort(start)
    ends = (start + length)[order]
    return ends[-1] == numel and np.array_equal(start[order], [0, *ends[:-1]])


def _position(read: Read) -> tuple[str, int]:
    return read.source.path, read.source.start_bytes


def shard_of(tensor: Any) -> CodedShard | None:
    """The shard that `tensor` is a placeholder of, or a view of one; else None."""
    if type(tensor) is not torch.Tensor or tensor.device.type != "meta":
        return None
    return _SHARDS.get(tensor.untyped_storage()._cdata)


def set_deferring(planner: Any, defers: bool) -> None:
    """Whether what reads for a DCP planner notes the reads of coded states instead."""
    setattr(planner, _DEFERS, defers)


def with_memory(planner: Any, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that can be read into: `tensor` itself unless it is a placeholder."""
    shard = None if getattr(planner, _DEFERS, False) else shard_of(tensor)
    return tensor if shard is None else shard.real(tensor)


def give_shared_shards_memory(sharded_state_dict: Any, distribution: Any) -> None:
    """Placeholders that ranks will exchange after reading get memory.

    Args:
        distribution: Megatron's ShardDistribution of a fully parallel load.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.utils import _sharded_tensor_shard_id

    for sharded in nested_values(sharded_state_dict):
        if isinstance(sharded, ShardedTensor):
            shard = shard_of(sharded.data)
            ranks = distribution.all_ranks_for_shard.get(_sharded_tensor_shard_id(sharded), ())
            if shard is not None and len(ranks) > 1:
                sharded.data = shard.real(sharded.data)


def load_shards(
    shards: Iterable[tuple[CodedShard, torch.device, Callable[[torch.Tensor], None]]],
) -> None:
    """Read, hand over and release shards, one at a time.

    Args:
        shards: each with the device of its code, and what takes its value (1-D float32).
    """
    present = [entry for entry in shards if not entry[0].is_absent]
    ordered = sorted(
        present, key=lambda entry: min(map(_position, entry[0].reads), default=("", 0))
    )
    memory = _Memory((shard.numel, device) for shard, device, _ in ordered if shard.buffer is None)
    total_bytes = sum(read.source.nbytes for shard, _, _ in ordered for read in shard.reads)
    with BoxReader(total_bytes) as boxes:
        for shard, device, take in ordered:
            flat = shard.buffer
            if flat is None:
                flat = memory.get(shard.numel, device)
            shard.read_into(boxes, flat)
            take(flat)
            shard.release()


class _Memory:
    """One float32 buffer on each device, as large as the largest shard, for one after the other."""

    def __init__(self, wanted: Iterable[tuple[int, torch.device]]) -> None:
        self._largest: dict[torch.device, int] = {}
        self._buffers: dict[torch.device, torch.Tensor] = {}
        for numel, device in wanted:
            self._largest[device] = max(numel, self._largest.get(device, 0))

    def get(self, numel: int, device: torch.device) -> torch.Tensor:
        if device not in self._buffers:
            largest = self._largest[device]
            self._buffers[device] = torch.empty(largest, dtype=torch.float32, device=device)
        return self._buffers[device][:numel]

"""Finds the parameters in dp_reshardable's flat buckets, and proves every one of them.

The format does not say which parameter lies where. Two facts do: Megatron fills its buffers with
the parameters in reverse order of the modules, each on a boundary that is also a chunk boundary in
the metadata; and every fp32 master rounds to the weight that the same checkpoint's model holds. The
order proposes a place and the values prove it. One parameter that does not fit, and the answer is
a reason why the layout cannot be known: nothing is guessed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vime_optim.files.dcp_metadata import Chunk, TensorEntry
from vime_optim.files.geometry import Box, round_up, tiles
from vime_optim.tools.names import BucketKey, parse_key
from vime_optim.tools.reader import Checkpoint

_BLOCK_BYTES = 4 * 1024 * 1024
_ALIGN_ELEM = 64
"""Parameters start on this many elements in a distributed optimizer's buffer
(param_and_grad_buffer.py, optimizer/param_layout.py)."""


@dataclass(frozen=True)
class Place:
    """A box of a model tensor, from `start` on in the buckets whose keys begin with `stem`."""

    box: Box
    stem: str
    start: int


@dataclass
class BucketLayout:
    """Places by model key, and the states that every bucket has."""

    states: tuple[str, ...]
    places: dict[str, list[Place]] = field(default_factory=lambda: defaultdict(list))


@dataclass(frozen=True)
class _Part:
    """One chunk of the model: what a rank's parameter, or half of a SwiGLU one, looks like."""

    entry: TensorEntry
    chunk: Chunk


def derive_layout(checkpoint: Checkpoint, keys: dict[str, BucketKey]) -> BucketLayout | str:
    """The proved layout, or a sentence that says why there is none.

    Args:
        keys: the bucket tensors of the checkpoint and what their keys mean.
    """
    stems: dict[str, BucketKey] = {}
    states: dict[str, set[str]] = defaultdict(set)
    for key, meaning in keys.items():
        stem = key[: -len(meaning.state)]
        stems[stem] = meaning
        states[stem].add(meaning.state)
    common = set.intersection(*states.values())
    if "param" not in common:
        return "the buckets hold no fp32 master parameters to hold against the model's weights"
    if any(checkpoint.tensors[stem + "param"].dtype != torch.float32 for stem in stems):
        return "the masters are not float32, so they cannot be held against the model's weights"
    parts = _parts_in_buffer_order(checkpoint)
    if not parts:
        return "the checkpoint holds no model weights to hold the masters against"
    finder = _Finder(checkpoint, parts, BucketLayout(tuple(sorted(common))))
    for stem in sorted(stems, key=lambda s: stems[s].order):
        problem = finder.place_bucket(stem, stems[stem])
        if problem is not None:
            return problem
    return finder.finish()


def _parts_in_buffer_order(checkpoint: Checkpoint) -> list[_Part]:
    """The model's chunks, last module first, as Megatron's buffers hold them.

    Layers that are stacked in one tensor (key `...layers.<name>`, layer on the first axis) are
    taken apart: all names of a layer stand together.
    """
    model = [entry for key, entry in checkpoint.tensors.items() if parse_key(key) is None]
    block: dict[str, int] = {}
    ranked = []
    for position, entry in enumerate(model):
        stem = entry.key.partition(".layers.")[0] if ".layers." in entry.key else entry.key
        block.setdefault(stem, position)
        for chunk in entry.chunks:
            layer = chunk.offset[0] if ".layers." in entry.key and chunk.offset else 0
            rank = (-block[stem], -layer, -position, chunk.offset)
            ranked.append((rank, _Part(entry, chunk)))
    ranked.sort(key=lambda pair: pair[0])
    return [part for _, part in ranked if part.chunk.numel > 0]


class _Finder:
    def __init__(self, checkpoint: Checkpoint, parts: list[_Part], layout: BucketLayout) -> None:
        self._checkpoint, self._parts, self._layout = checkpoint, parts, layout
        self._next = 0
        self._group: Any = None
        self._found: set[int] = set()
        self._used: set[int] = set()
        # Parts by dtype, length and bytes of their first elements.
        self._heads: dict[tuple[torch.dtype, int], dict[bytes, list[int]]] = {}
        for index, part in enumerate(parts):
            head = self._head(part)
            kind = (part.entry.dtype, len(head))
            self._heads.setdefault(kind, {}).setdefault(head, []).append(index)

    def place_bucket(self, stem: str, meaning: BucketKey) -> str | None:
        """Fills in the places of one bucket; a reason where it does not work out."""
        if self._group != meaning.order[:3]:
            # Another data-parallel group or buffer holds other parameters, or copies of the same.
            self._group, self._next = meaning.order[:3], 0
            self._used = set()
        masters = self._checkpoint.tensors[stem + "param"]
        self._checkpoint.check_cover(masters)
        size = masters.shape[0]
        position = 0
        while position < size:
            index = self._match(masters, position)
            if index is not None:
                position = self._accept(index, stem, position)
            elif position % _ALIGN_ELEM:
                position = min(size, round_up(position, _ALIGN_ELEM))
            else:
                return f"the masters from {position} on in {stem}param match no weight, or several"
        return None

    def _accept(self, index: int, stem: str, position: int) -> int:
        part = self._parts[index]
        if index not in self._found:
            self._layout.places[part.entry.key].append(Place(part.chunk, stem, position))
        self._found.add(index)
        self._used.add(index)
        self._next = index + 1
        return position + part.chunk.numel

    def _match(self, masters: TensorEntry, position: int) -> int | None:
        """The part whose values stand at `position`.

        The part that comes next by Megatron's order needs only to fit; any other one must also be
        the only one that fits.
        """
        candidates = self._candidates(masters, position)
        if self._next in candidates and self._same(masters, position, self._parts[self._next]):
            return self._next
        fitting = [i for i in candidates if self._same(masters, position, self._parts[i])]
        return fitting[0] if len(fitting) == 1 else None

    def _candidates(self, masters: TensorEntry, position: int) -> list[int]:
        """Parts that are unplaced, not too long, and begin with the values at `position`."""
        found = []
        for (dtype, length), heads in self._heads.items():
            here = self._read_head(masters, position, dtype)[:length]
            found += [
                index
                for index in heads.get(here, ())
                if index not in self._used
                and position + self._parts[index].chunk.numel <= masters.shape[0]
            ]
        return found

    def _head(self, part: _Part) -> bytes:
        box = next(tiles(part.chunk.size, 8))
        return self._checkpoint.read_box(part.entry, box.moved(part.chunk.offset)).tobytes()

    def _read_head(self, masters: TensorEntry, position: int, dtype: torch.dtype) -> bytes:
        stop = min(position + 8, masters.shape[0])
        values = self._checkpoint.read_box(masters, Box((position,), (stop - position,)))
        return rounded(values, dtype).tobytes()

    def _same(self, masters: TensorEntry, position: int, part: _Part) -> bool:
        for box in tiles(part.chunk.size, _BLOCK_BYTES // 4):
            moved = box.moved(part.chunk.offset)
            weights = self._checkpoint.read_box(part.entry, moved).reshape(-1)
            values = self._checkpoint.read_box(masters, Box((position,), (box.numel,)))
            if not np.array_equal(rounded(values, part.entry.dtype), weights):
                return False
            position += box.numel
        return True

    def finish(self) -> BucketLayout | str:
        """The layout, if each weight that has optimizer state has all of it."""
        for key, places in self._layout.places.items():
            entry = self._checkpoint.tensors[key]
            held = sum(place.box.numel for place in places)
            if held != entry.numel:
                return f"only {held} of {entry.numel} elements of {key} were found in the buckets"
        return self._layout


def rounded(bits: np.ndarray[Any, Any], dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """float32 bits rounded to a model dtype as torch's copy does it; bits again."""
    values = torch.from_numpy(bits.view(np.float32))
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return values.to(dtype).view(carrier).numpy().view(f"u{dtype.itemsize}")


def possible_padding(entry: TensorEntry) -> Iterator[tuple[int, int]]:
    """Elements of a bucket that may lie between parameters and then hold whatever memory held.

    Padding fills up to the next multiple of 64 and is a chunk of its own; so may be the tail of a
    parameter that a rank's shard begins with, which is why it is only possible.
    """
    for chunk in entry.chunks:
        start, stop = chunk.offset[0], chunk.offset[0] + chunk.size[0]
        if start % _ALIGN_ELEM and start < stop <= round_up(start, _ALIGN_ELEM):
            yield start, stop

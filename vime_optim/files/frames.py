"""Finds the elements of many stored tensors of few shapes without parsing each of their archives.

A torch.save archive is a head (the pickle among it), the elements and a tail (the zip's directory).
Where an item has the very head and tail of one that was parsed, its elements lie in the same place.
That holds for the files of our own writer, which stores no CRC-32; in stock's the tail differs from
tensor to tensor, and each is parsed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from vime_optim.files.items import FileWindow, ItemLayout, read_layout

_FRAME_LIMIT_BYTES = 4096
_SAME_LENGTH_LIMIT = 4


@dataclass(frozen=True, slots=True)
class _Frame:
    """What an item of one tensor looks like around its elements; `start` is relative to it."""

    head: bytes
    tail: bytes
    layout: ItemLayout


class Layouts:
    """Layouts of items, remembering the frames seen. Used by one thread."""

    def __init__(self) -> None:
        self._frames: dict[int, list[_Frame]] = {}
        self.parsed = 0
        """Archives that were parsed, not recognized."""

    def find(self, descriptor: int, offset: int, length: int, where: str) -> ItemLayout:
        """Where the elements of the item at [offset, offset + length) of a file lie, in bytes.

        Raises:
            CheckpointError: as read_layout.
        """
        known = self._frames.setdefault(length, [])
        for frame in known:
            head = os.pread(descriptor, len(frame.head), offset)
            if head != frame.head:
                continue
            tail = os.pread(descriptor, len(frame.tail), offset + length - len(frame.tail))
            if tail == frame.tail:
                return replace(frame.layout, start_bytes=offset + len(head))
        self.parsed += 1
        layout = read_layout(FileWindow(descriptor, offset, length), offset, length, where)
        head_bytes = layout.start_bytes - offset
        tail_bytes = length - head_bytes - layout.extent_elem * layout.dtype.itemsize
        if max(head_bytes, tail_bytes) <= _FRAME_LIMIT_BYTES and len(known) < _SAME_LENGTH_LIMIT:
            head = os.pread(descriptor, head_bytes, offset)
            tail = os.pread(descriptor, tail_bytes, offset + length - tail_bytes)
            known.append(_Frame(head, tail, layout))
        return layout

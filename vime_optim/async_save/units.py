"""A file of a checkpoint as units: runs of its bytes, in file order, and where they come from.

A unit is what is guarded, copied and written at a time. Its bytes are those of `write_file`: item
after item, each a zip archive with the tensor's elements in it. Host tensors are written from
where they are. What is on a device, coded, or not contiguous is first brought into a host buffer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vime_optim.files.fastfile import CHUNK_BYTES, Extent, parts_of
from vime_optim.files.lazy import LazyValue
from vime_optim.optimizer.update_order import Span, UpdateOrder, sources_of, span_of

UNIT_BYTES = CHUNK_BYTES
"""The most that one unit holds: what one digest covers, and one call writes."""

_BLOCK_BYTES = 16 << 20  # coded states are decoded this much at a time, in device memory

_ITEMS_PER_UNIT = 64  # so that an update does not wait for many tensors that are not its own

PENDING, TAKEN, COPIED, DONE = range(4)
"""States of a unit: not read yet; being read; a copy of it waits to be written; written."""


class Constant:
    """Bytes that nothing changes."""

    def __init__(self, data: Any) -> None:
        self.data = memoryview(data).cast("B")
        self.nbytes = len(self.data)

    def view(self) -> memoryview:
        return self.data

    def fill(self, room: torch.Tensor) -> None:
        room.numpy()[:] = self.data


class HostBytes:
    """A part of a contiguous host tensor, told by its address."""

    def __init__(self, tensor: torch.Tensor, address: int, nbytes: int) -> None:
        self._tensor = tensor  # keeps the memory
        self._address = address
        self.nbytes = nbytes

    def view(self) -> memoryview:
        return memoryview((ctypes.c_char * self.nbytes).from_address(self._address))

    def fill(self, room: torch.Tensor) -> None:
        ctypes.memmove(room.data_ptr(), self._address, self.nbytes)


class TensorBytes:
    """Bytes [start, start + nbytes) of a tensor that is on a device or not contiguous."""

    def __init__(self, tensor: torch.Tensor, start: int, nbytes: int) -> None:
        self._tensor = tensor
        self._start = start
        self.nbytes = nbytes

    def fill(self, room: torch.Tensor) -> None:
        flat = self._tensor.reshape(-1).view(torch.uint8)
        room.copy_(flat[self._start : self._start + self.nbytes], non_blocking=True)


class CodedBytes:
    """Bytes [start, start + nbytes) of the value of a coded state, decoded block by block."""

    def __init__(self, value: LazyValue, start: int, nbytes: int) -> None:
        size = value.element_size()
        self._value = LazyValue(
            value.slot, value.start + start // size, (nbytes // size,), value.device
        )
        self.nbytes = nbytes

    def fill(self, room: torch.Tensor) -> None:
        at = 0
        for block in self._value.blocks(_BLOCK_BYTES // self._value.element_size()):
            data = block.view(torch.uint8)
            room[at : at + data.numel()].copy_(data, non_blocking=True)
            at += data.numel()


Segment = Constant | HostBytes | TensorBytes | CodedBytes


@dataclass(eq=False)
class Unit:
    """One run of a file's bytes.

    Attributes:
        kind: whether its tensors are on a device (or coded), and whether no optimizer is known to
            own them.
        direct: all of it lies in host memory as it is written.
        positions: numbers of the owners that change some of it.
        names: keys of the tensors in it.
        sources: the tensors that it is read from, with their versions at the save.
    """

    segments: list[Segment] = field(default_factory=list)
    nbytes: int = 0
    items: int = 0
    kind: tuple[bool, bool] = (False, False)
    direct: bool = True
    positions: set[int] = field(default_factory=set)
    names: list[str] = field(default_factory=list)
    sources: list[tuple[torch.Tensor, int | None]] = field(default_factory=list)
    state: int = PENDING
    room: Any = None  # the buffer with its copy

    @property
    def on_device(self) -> bool:
        return self.kind[0]

    @property
    def unknown(self) -> bool:
        return self.kind[1]

    @property
    def first_position(self) -> float:
        return min(self.positions, default=float("inf"))

    def add(self, segment: Segment) -> None:
        self.segments.append(segment)
        self.nbytes += segment.nbytes
        self.direct = self.direct and hasattr(segment, "view")

    def fill(self, room: torch.Tensor) -> memoryview:
        """Copy all bytes into `room` (uint8, host). Work on a device is only queued."""
        at = 0
        for segment in self.segments:
            segment.fill(room[at : at + segment.nbytes])
            at += segment.nbytes
        return memoryview(room[:at].numpy())  # type: ignore[arg-type]

    def views(self) -> list[memoryview]:
        """The bytes where they are; only when `direct`."""
        return [segment.view() for segment in self.segments]  # type: ignore[union-attr]

    def spans(self) -> Iterable[Span]:
        for tensor, _ in self.sources:
            span = span_of(tensor)
            if span is not None:
                yield span

    def changed_in_place(self) -> bool:
        """Whether a source was updated in place since the save, as far as torch counts that."""
        return any(v is not None and tensor._version != v for tensor, v in self.sources)

    def release(self) -> None:
        """Let go of the tensors."""
        self.segments.clear()
        self.sources.clear()


@dataclass(eq=False)
class FilePlan:
    """One file: its units in order, and where each item will lie."""

    path: str
    name: str
    pairs: Sequence[tuple[Any, Any]]
    units: list[Unit] = field(default_factory=list)
    extents: list[Extent] = field(default_factory=list)


def plan_file(bucket: Any, order: UpdateOrder) -> FilePlan:
    """Lay out one file.

    Args:
        bucket: (path, name, (byte items, tensor items)); each item with its data.
        order: who changes what.
    """
    path, name, (byte_items, tensor_items) = bucket
    plan = FilePlan(str(path), name, [*byte_items, *tensor_items])
    layout = _Layout(plan, order)
    for item, data in plan.pairs:
        layout.add(str(item.index.fqn), data)
    return plan


class _Layout:
    def __init__(self, plan: FilePlan, order: UpdateOrder) -> None:
        self._plan = plan
        self._order = order
        self._at = 0

    def add(self, name: str, data: Any) -> None:
        padding, *parts = parts_of(data, self._at)
        self._constant(padding)
        offset = self._at
        for part in parts:
            if isinstance(part, torch.Tensor):
                self._elements(name, part.detach())
            else:
                self._constant(part)
        self._plan.extents.append(Extent(offset, self._at - offset))

    def _elements(self, name: str, tensor: torch.Tensor) -> None:
        nbytes = tensor.numel() * tensor.element_size()
        positions = self._order.positions_of(tensor)
        sources = [(source, self._version_of(source, positions)) for source in sources_of(tensor)]
        span = span_of(tensor)
        coded = isinstance(tensor, LazyValue)
        # A simulated device counts as one here; its memory is the host's all the same.
        on_device = coded or tensor.device.type != "cpu"
        direct = not on_device and span is not None and tensor.is_contiguous()
        done = 0
        kind = (on_device, not positions)
        while done < nbytes:
            unit = self._unit(kind)
            size = min(nbytes - done, UNIT_BYTES - self._at % UNIT_BYTES)
            if direct:
                assert span is not None
                unit.add(HostBytes(tensor, span[0] + done, size))
            elif coded:
                unit.add(CodedBytes(tensor, done, size))  # type: ignore[arg-type]
            else:
                unit.add(TensorBytes(tensor, done, size))
            unit.kind = kind
            unit.positions.update(positions)
            unit.names.append(name)
            unit.sources.extend(sources)
            unit.items += 1
            done += size
            self._at += size

    def _constant(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        while view:
            size = min(len(view), UNIT_BYTES - self._at % UNIT_BYTES)
            self._unit().add(Constant(view[:size]))
            view = view[size:]
            self._at += size

    def _unit(self, kind: tuple[bool, bool] | None = None) -> Unit:
        """The unit that the next bytes belong to, of one kind of tensors (None: any)."""
        units = self._plan.units
        if not units:
            units.append(Unit())
        last = units[-1]
        full = self._at % UNIT_BYTES == 0 or last.items >= _ITEMS_PER_UNIT
        other = kind is not None and last.items > 0 and last.kind != kind
        if (full and last.nbytes) or other:
            units.append(Unit())
        return units[-1]

    def _version_of(self, tensor: torch.Tensor, positions: list[int]) -> int | None:
        """The count of in-place updates of a tensor; None where it says nothing.

        Views of one buffer share a count: it is told only where one owner changes all of it.
        """
        if not positions or tensor.is_inference() or span_of(tensor) is None:
            return None
        with torch._C.DisableTorchFunction():
            base = tensor if tensor._base is None else tensor._base
            whole = base.untyped_storage().nbytes() == base.numel() * base.element_size()
        if not whole or self._order.positions_of(base) != positions:
            return None
        return tensor._version

"""Which optimizer changes which memory, in the order of the last update.

Megatron's optimizers are noted when they step. HybridDeviceOptimizer updates one sub-optimizer
after the other, so a save is written in that order: the update then runs behind the writer.
Memory is told by addresses, which views, `.data` and other tensor objects cannot hide.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from vime_optim.files.geometry import extent
from vime_optim.files.lazy import LazyValue

Span = tuple[int, int]
"""First address and the one after the last, in bytes."""

_noted: dict[int, weakref.ref[Any]] = {}


def note(optimizer: Any) -> None:
    """Remember a Megatron optimizer (with `.optimizer` inside) that is about to step."""
    key = id(optimizer)
    _noted.pop(key, None)  # the last one noted steps last
    _noted[key] = weakref.ref(optimizer)


def span_of(tensor: torch.Tensor) -> Span | None:
    """The addresses that a plain tensor covers, None when it has no memory of its own."""
    with torch._C.DisableTorchFunction():
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            return None
        try:
            start = tensor.data_ptr()
        except RuntimeError:  # a wrapper: float8, DTensor
            return None
        if not start or not tensor.numel():
            return None
        return start, start + extent(tensor.shape, tensor.stride()) * tensor.element_size()


def sources_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors whose memory is read when `tensor` is written."""
    if isinstance(tensor, LazyValue):
        return [value for value in vars(tensor.slot).values() if isinstance(value, torch.Tensor)]
    return [tensor]


_HOLD_NOTHING = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device))


def tensors_in(obj: Any) -> Iterator[torch.Tensor]:
    """Every tensor that an update of `obj` (an optimizer, or containers of them) may change."""
    seen: set[int] = set()
    stack = [obj]
    while stack:
        current = stack.pop()
        if type(current) in _HOLD_NOTHING or id(current) in seen:
            continue
        seen.add(id(current))
        if isinstance(current, torch.Tensor):
            yield current
        elif isinstance(current, (list, tuple, set, frozenset)):
            stack.extend(current)
        elif isinstance(current, dict):
            if isinstance(next(iter(current), None), torch.Tensor):
                stack.extend(current.keys())
            stack.extend(current.values())
        elif _is_update_owner(current):
            stack.extend(vars(current).values())


def _is_update_owner(obj: Any) -> bool:
    """Optimizers of torch and Megatron, and Megatron's parameter buffers and buckets."""
    if isinstance(obj, torch.optim.Optimizer):
        return True
    cls = type(obj)
    return cls.__module__.startswith("megatron.core.optimizer") or cls.__name__ in {
        "_ParamAndGradBuffer",
        "_ParamAndGradBucket",
        "_ParamAndGradBucketGroup",
    }


@dataclass(frozen=True)
class Owner:
    """One step of an update: it changes the memory that is listed for it.

    Attributes:
        optimizer: the torch optimizer whose step this is.
        after: not the step itself but what follows it (parameters copied from masters, gathered
            from other ranks).
    """

    optimizer: Any
    after: bool

    @property
    def key(self) -> tuple[int, bool]:
        return id(self.optimizer), self.after


@dataclass
class UpdateOrder:
    """The steps of an update, first to last, and the memory that each changes."""

    owners: list[Owner] = field(default_factory=list)
    containers: set[int] = field(default_factory=set)
    """ids of optimizers that only call other ones."""
    _steps: _Spans = field(default_factory=lambda: _Spans())
    _after: _Spans = field(default_factory=lambda: _Spans())
    _found: dict[tuple[Span, ...], list[int]] = field(default_factory=dict)

    def positions_of(self, tensor: torch.Tensor) -> list[int]:
        """Numbers of the owners that change memory of `tensor`, first to last; [] when no
        optimizer is known to own it."""
        spans = tuple(filter(None, map(span_of, sources_of(tensor))))
        if spans not in self._found:
            found: set[int] = set()
            for span in spans:
                found |= self._steps.overlapping(span)
                found |= self._after.overlapping(span)
            self._found[spans] = sorted(found)
        return self._found[spans]

    def add(self, owner: Owner, tensors: Iterable[torch.Tensor]) -> None:
        spans = self._after if owner.after else self._steps
        for tensor in tensors:
            span = span_of(tensor)
            if span is not None:
                spans.add(span, len(self.owners))
        self.owners.append(owner)

    def settle(self) -> UpdateOrder:
        self._steps.sort()
        self._after.sort()
        return self


class _Spans:
    """Address ranges with a number each; finds those that overlap a range."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int, int], None] = {}
        self._sorted: list[tuple[int, int, int]] = []
        self._starts: list[int] = []
        self._reach: list[int] = []  # the furthest end among the rows up to here

    def add(self, span: Span, number: int) -> None:
        self._rows[span[0], span[1], number] = None

    def sort(self) -> None:
        self._sorted = sorted(self._rows)
        self._starts = [row[0] for row in self._sorted]
        reach = 0
        self._reach = [reach := max(reach, row[1]) for row in self._sorted]

    def overlapping(self, span: Span) -> set[int]:
        start, end = span
        found = set()
        index = bisect.bisect_left(self._starts, end) - 1
        while index >= 0 and self._reach[index] > start:
            if self._sorted[index][1] > start:
                found.add(self._sorted[index][2])
            index -= 1
        return found


def current_order() -> UpdateOrder:
    """The order of the optimizers that were noted and still live."""
    order = UpdateOrder()
    for key, reference in list(_noted.items()):
        optimizer = reference()
        if optimizer is None:
            _noted.pop(key, None)
        inner = getattr(optimizer, "optimizer", None)
        if inner is None:
            continue
        parts = getattr(inner, "sub_optimizers", None)
        if parts is not None:
            order.containers.add(id(inner))
        for part in [inner] if parts is None else parts:
            order.add(Owner(part, after=False), _changed_by_step(part, inner))
        order.add(Owner(inner, after=True), tensors_in(optimizer))
    return order.settle()


def _changed_by_step(part: Any, inner: Any) -> Iterator[torch.Tensor]:
    yield from tensors_in(part)
    originals = getattr(inner, "inner_param_to_orig_param", None)
    if originals is None:
        return
    # The hybrid optimizer copies a part's parameters to the device as soon as the part has stepped.
    for group in part.param_groups:
        for param in group["params"]:
            if param in originals:
                yield originals[param]

"""Coded states (float16, float8, the 16 low bits of a master) are saved without a copy of them all.

A checkpoint holds their float32 values, which are two to four times as large as the codes. Decoded
when a state dict is built, they would all be on the device at once, just when a training run has
filled it. A LazyValue stands for such a value: it has its shape, dtype and device and no memory.
Our file writer decodes it a piece at a time; for anything else that touches it, it is a tensor: an
operation decodes it for as long as the operation takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils._pytree import tree_leaves, tree_map_only

_SAME_VALUE = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class Coded(Protocol):
    """A coded state: what optimizer/slots.py says of its slots, as far as it is needed here."""

    @property
    def device(self) -> torch.device: ...

    @property
    def is_read_whole(self) -> bool: ...

    def read_range(self, start: int, end: int) -> torch.Tensor: ...


class LazyValue(torch.Tensor):
    """The float32 value of elements [start, start + numel) of a coded state.

    Args:
        slot: the state, 1-D. Its value counts when it is decoded, as with a view of a tensor.
        start: first element.
        shape: shape of the value.
    """

    slot: Coded
    start: int

    @staticmethod
    def __new__(
        cls, slot: Coded, start: int, shape: tuple[int, ...], device: torch.device | None = None
    ) -> LazyValue:
        value: LazyValue = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.float32, device=device or slot.device
        )
        value.slot = slot
        value.start = start
        return value

    # Subclasses are passed on to __torch_dispatch__ alone.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @torch.no_grad()
    def decode(self) -> torch.Tensor:
        """The value in memory of its own."""
        flat = self.slot.read_range(self.start, self.start + self.numel())
        return flat.view(self.shape)

    def blocks(self, limit_numel: int) -> Iterator[torch.Tensor]:
        """The value in order, flat, in tensors of at most `limit_numel` elements."""
        end = self.start + self.numel()
        if self.slot.is_read_whole:
            whole = self.decode().view(-1)
            yield from (
                whole[at : at + limit_numel] for at in range(0, end - self.start, limit_numel)
            )
            return
        for first in range(self.start, end, limit_numel):
            with torch.no_grad():
                block = self.slot.read_range(first, min(first + limit_numel, end))
            yield block

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _SAME_VALUE:
            same = args[0]
            return LazyValue(same.slot, same.start, tuple(same.shape), same.device)
        if func is torch.ops.aten.is_pinned.default:  # asked of every tensor by DCP's planner
            return False
        kwargs = kwargs or {}
        if any(isinstance(leaf, LazyValue) for leaf in tree_leaves(_written(func, args, kwargs))):
            raise RuntimeError(f"{func} would write into a value that is decoded when read")
        args, kwargs = tree_map_only(LazyValue, LazyValue.decode, (args, kwargs))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.decode()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.decode().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyValue({tuple(self.shape)}, device={self.device})"


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """What an operator writes into: arguments, lists of them (`_foreach_...`), `out=`."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[position] if position < len(args) else kwargs.get(argument.name))
    return found


def _sent(value: LazyValue) -> Any:
    """How another process gets it through a queue: torch sends no storage of a device by itself,
    as `__reduce_ex__` would have it, only tensors."""
    return reduce_tensor(value.decode())  # type: ignore[no-untyped-call]


ForkingPickler.register(LazyValue, _sent)

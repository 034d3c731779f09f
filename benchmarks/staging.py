"""Collectives of device tensors through gloo, by way of host copies.

Several ranks may share one GPU under gloo, but not under NCCL. What gloo itself can do with device
tensors differs between torch versions, so each collective is run on copies in host memory, one
after the other: slow, the same bits in every run, and of no matter to saving and loading. Messages
between two ranks end when they are waited for.
"""

from __future__ import annotations

from typing import Any

import torch

#: These add up values; gloo has not known 16-bit floats in every torch version.
_REDUCING = ("allreduce", "reduce", "reduce_scatter")
_METHODS = (
    "allgather",
    "_allgather_base",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)


class Done:
    """Stands in for the handle of a collective that has ended."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Underway:
    """A message between two ranks, which may both send before either receives."""

    def __init__(self, work: Any, given: Any, copies: Any, *, is_received: bool) -> None:
        self._work, self._given, self._copies = work, given, copies
        self._is_received = is_received

    def wait(self, *_: Any) -> bool:
        self._work.wait()
        if self._is_received:
            _copy_back(self._given, self._copies)
            self._is_received = False
        return True

    def is_completed(self) -> bool:
        return bool(self._work.is_completed()) and self.wait()


def stage_collectives() -> None:
    """From here on, collectives with device tensors run on host copies, in this process."""
    kind = torch.distributed.ProcessGroup
    for name in _METHODS:
        original = getattr(kind, name, None)
        if original is not None:
            setattr(kind, name, _staged(original, name))


def _staged(original: Any, name: str) -> Any:
    reducing = name.lstrip("_").startswith(_REDUCING)

    def staged(group: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(_on_device(value) for value in (*args, *kwargs.values())):
            return original(group, *args, **kwargs)
        if name == "allgather" and not kwargs and _is_uneven(args[0]):
            _gather_uneven(group, *args[:2])
            return Done()
        copies = [_on_host(value, reducing) for value in args]
        named = {key: _on_host(value, reducing) for key, value in kwargs.items()}
        work = original(group, *copies, **named)
        # The first argument is the result, and may lie within an input.
        given, got = (args or tuple(kwargs.values()))[0], (copies or list(named.values()))[0]
        underway = Underway(work, given, got, is_received=name != "send")
        if name not in ("send", "recv"):
            underway.wait()
        return underway

    return staged


def _is_uneven(outputs: list[list[torch.Tensor]]) -> bool:
    return len({tensor.shape for tensor in outputs[0]}) > 1


def _gather_uneven(
    group: Any, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]
) -> None:
    """NCCL gathers tensors of different sizes, one broadcast for each; gloo does not."""
    for root, output in enumerate(outputs[0]):
        source = inputs[0] if group.rank() == root else output
        options = torch.distributed.BroadcastOptions()
        options.rootRank = root
        copy = source.detach().cpu().contiguous()
        group.broadcast([copy], options).wait()
        output.detach().copy_(copy)


def _on_device(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_cuda
    return isinstance(value, (list, tuple)) and any(_on_device(item) for item in value)


def _on_host(value: Any, reducing: bool) -> Any:
    if isinstance(value, torch.Tensor):
        wide = reducing and value.dtype in (torch.bfloat16, torch.float16)
        return value.detach().to(device="cpu", dtype=torch.float32 if wide else value.dtype)
    if isinstance(value, (list, tuple)):
        return type(value)(_on_host(item, reducing) for item in value)
    return value


def _copy_back(target: Any, source: Any) -> None:
    if isinstance(target, torch.Tensor):
        if target is not source:
            target.detach().copy_(source)
    elif isinstance(target, (list, tuple)):
        for here, there in zip(target, source, strict=True):
            _copy_back(here, there)

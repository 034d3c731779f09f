"""Measures a phase of a rank: time, host and device memory, bytes read and moved by collectives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.parts import Clock, timed


@dataclass
class Phase:
    """What one rank used in one phase; `extra` is memory above what it had before.

    `parts` are seconds by part (parts.py); what is left of `seconds` is in none of them.
    """

    seconds: float
    host_extra_bytes: int
    host_peak_bytes: int
    device_extra_bytes: int
    device_peak_bytes: int
    sent_bytes: int
    read_bytes: int
    written_bytes: int
    parts: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Meter:
    """Measures phases of this process. `simulated`: the device is the simulated one."""

    def __init__(self, *, simulated: bool) -> None:
        self._simulated = simulated
        self._collectives = Collectives()
        self._sampler = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("sampler.py")), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # The simulated device is of no use to a process without torch.
            env={k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "LD_PRELOAD")},
        )

    def close(self) -> None:
        self._sampler.kill()
        self._sampler.wait()
        self._collectives.restore()

    def phase(self, work: Callable[[], Any]) -> tuple[Any, Phase]:
        """Run `work` on all ranks at the same time; returns its result and what it used."""
        clock = Clock()
        with timed(clock):
            result, phase = self._measured(work)
        phase.parts = clock.seconds
        return result, phase

    def _measured(self, work: Callable[[], Any]) -> tuple[Any, Phase]:
        torch.distributed.barrier()
        self._synchronize()
        self._reset_device_peak()
        device_before = self._device_bytes()
        host_before = self._ask("begin")["now_bytes"]
        io_before = io_counts()
        self._collectives.sent_bytes = 0
        began = time.perf_counter()
        result = work()
        self._synchronize()
        seconds = time.perf_counter() - began
        sent_bytes = self._collectives.sent_bytes
        io_after = io_counts()
        host_peak = self._ask("end")["peak_bytes"]
        phase = Phase(
            seconds=seconds,
            host_extra_bytes=max(0, host_peak - host_before),
            host_peak_bytes=host_peak,
            device_extra_bytes=max(0, self._device_peak_bytes() - device_before),
            device_peak_bytes=self._device_peak_bytes(),
            sent_bytes=sent_bytes,
            read_bytes=io_after["rchar"] - io_before["rchar"],
            written_bytes=io_after["wchar"] - io_before["wchar"],
        )
        return result, phase

    def _ask(self, command: str) -> dict[str, int]:
        assert self._sampler.stdin is not None
        assert self._sampler.stdout is not None
        self._sampler.stdin.write(command + "\n")
        self._sampler.stdin.flush()
        answer: dict[str, int] = json.loads(self._sampler.stdout.readline())
        return answer

    def _synchronize(self) -> None:
        if not self._simulated:
            torch.cuda.synchronize()

    def _device_bytes(self) -> int:
        if self._simulated:
            from vime_optim.simulate.device import LEDGER

            return LEDGER.current_bytes
        return torch.cuda.memory_allocated()

    def _device_peak_bytes(self) -> int:
        if self._simulated:
            from vime_optim.simulate.device import LEDGER

            return LEDGER.peak_bytes
        return torch.cuda.max_memory_allocated()

    def _reset_device_peak(self) -> None:
        if self._simulated:
            from vime_optim.simulate.device import LEDGER

            LEDGER.reset_peak()
        else:
            torch.cuda.reset_peak_memory_stats()


def io_counts() -> dict[str, int]:
    """Bytes that this process and its ended children passed to read and write calls."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def tensor_bytes(value: Any) -> int:
    """Bytes of the tensors in a nest of lists."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(tensor_bytes(item) for item in value)
    return 0


class Collectives:
    """Counts the bytes that this rank sends, in the methods of ProcessGroup.

    Every function of torch.distributed ends there, those for Python objects too, and so do names
    that were imported before. Counted is what the operation must move, not what an algorithm does.
    """

    def __init__(self) -> None:
        self.sent_bytes = 0
        self._originals: dict[str, Any] = {}
        kind = torch.distributed.ProcessGroup
        for name, count in _SENT.items():
            original = getattr(kind, name, None)
            if original is not None:
                self._originals[name] = original
                setattr(kind, name, self._counting(original, count))

    def restore(self) -> None:
        for name, original in self._originals.items():
            setattr(torch.distributed.ProcessGroup, name, original)

    def _counting(self, original: Any, count: Callable[..., int]) -> Any:
        def counting(group: Any, *args: Any, **kwargs: Any) -> Any:
            self.sent_bytes += count(group.size(), group.rank(), *args, *kwargs.values())
            return original(group, *args, **kwargs)

        return counting


def _root(options: Any) -> int:
    return int(getattr(options, "rootRank", 0))


def _all_to(size: int, rank: int, first: Any, second: Any = None, *rest: Any) -> int:
    """All-gathers: (outputs, inputs); the own input goes to every other rank."""
    return tensor_bytes(second) * (size - 1)


def _reduced(size: int, rank: int, tensors: Any, *rest: Any) -> int:
    return 2 * tensor_bytes(tensors) * (size - 1) // size


def _scattered(size: int, rank: int, outputs: Any, inputs: Any = None, *rest: Any) -> int:
    return tensor_bytes(inputs) * (size - 1) // size


def _from_root(size: int, rank: int, tensors: Any, options: Any = None, *rest: Any) -> int:
    return tensor_bytes(tensors) * (size - 1) if rank == _root(options) else 0


def _to_root(size: int, rank: int, tensors: Any, options: Any = None, *rest: Any) -> int:
    return 0 if rank == _root(options) else tensor_bytes(tensors)


def _gathered(size: int, rank: int, outputs: Any, inputs: Any = None, options: Any = None) -> int:
    return 0 if rank == _root(options) else tensor_bytes(inputs)


def _root_scatters(
    size: int, rank: int, outputs: Any, inputs: Any = None, options: Any = None
) -> int:
    return tensor_bytes(inputs) * (size - 1) // size if rank == _root(options) else 0


def _sent(size: int, rank: int, tensors: Any, *rest: Any) -> int:
    return tensor_bytes(tensors)


_SENT: dict[str, Callable[..., int]] = {
    "allgather": _all_to,
    "_allgather_base": _all_to,
    "allgather_coalesced": _all_to,
    "allgather_into_tensor_coalesced": _all_to,
    "allreduce": _reduced,
    "allreduce_coalesced": _reduced,
    "reduce_scatter": _scattered,
    "_reduce_scatter_base": _scattered,
    "reduce_scatter_tensor_coalesced": _scattered,
    "alltoall": _scattered,
    "alltoall_base": _scattered,
    "broadcast": _from_root,
    "reduce": _to_root,
    "gather": _gathered,
    "scatter": _root_scatters,
    "send": _sent,
}


@contextmanager
def watch_budget(budget_s: float) -> Iterator[Callable[[float], bool]]:
    """`fits(seconds)`: whether that much more still fits; the same answer on every rank."""
    deadline = time.monotonic() + budget_s

    def fits(seconds: float) -> bool:
        answer = [time.monotonic() + seconds < deadline]
        torch.distributed.broadcast_object_list(answer, src=0)
        return bool(answer[0])

    yield fits

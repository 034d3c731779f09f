"""Stand-ins for the functions and classes of torch.cuda."""

from __future__ import annotations

import contextlib
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vime_optim.simulate.attributes import Patches
from vime_optim.simulate.memory import LEDGER

TOTAL_MEMORY_BYTES = 80 * 1024**3


class Event:
    """An event on a stream that is always done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._at_s = 0.0

    def record(self, stream: Any = None) -> None:
        self._at_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds, as torch.cuda.Event counts."""
        return (end._at_s - self._at_s) * 1000.0


class Stream:
    """A stream that runs everything at once and in order."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device = torch.device("cuda", 0)
        self.priority = priority
        self.cuda_stream = id(self)

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


_DEFAULT_STREAM = Stream()
_current_stream = _DEFAULT_STREAM


@contextlib.contextmanager
def _stream(stream: Stream | None) -> Iterator[None]:
    global _current_stream
    previous = _current_stream
    _current_stream = previous if stream is None else stream
    try:
        yield
    finally:
        _current_stream = previous


def _set_stream(stream: Stream) -> None:
    global _current_stream
    _current_stream = stream


class _DeviceContext:
    """torch.cuda.device: there is one device, so entering it changes nothing."""

    def __init__(self, device: Any) -> None:
        self.idx = 0

    def __enter__(self) -> None: ...

    def __exit__(self, *exc: object) -> None: ...


def _no_op() -> Callable[..., None]:
    """A new function each time: torch._dynamo refuses to find one object under two names."""

    def nothing(*args: Any, **kwargs: Any) -> None: ...

    return nothing


def _properties(device: Any = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name="simulated device",
        major=9,
        minor=0,
        total_memory=TOTAL_MEMORY_BYTES,
        multi_processor_count=1,
        warp_size=32,
    )


def _memory_stats(device: Any = None) -> dict[str, int]:
    stats = {}
    for pool in ("allocated_bytes", "reserved_bytes", "active_bytes"):
        stats[f"{pool}.all.current"] = LEDGER.current_bytes
        stats[f"{pool}.all.peak"] = LEDGER.peak_bytes
    stats["num_alloc_retries"] = 0
    return stats


def _get_rng_state(device: Any = "cuda") -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    torch.default_generator.set_state(new_state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _stand_ins() -> dict[str, Any]:
    def current() -> int:
        return LEDGER.current_bytes

    def current_device() -> int:
        return 0

    return {
        # `_lazy_call` runs its callback at once, and `_lazy_init` returns, when this is set.
        "_initialized": True,
        "Event": Event,
        "Stream": Stream,
        "device": _DeviceContext,
        "stream": _stream,
        "set_stream": _set_stream,
        "current_stream": lambda device=None: _current_stream,
        "default_stream": lambda device=None: _DEFAULT_STREAM,
        "current_device": current_device,
        "device_count": lambda: 1,
        "set_device": _no_op(),
        "synchronize": _no_op(),
        "empty_cache": _no_op(),
        "ipc_collect": _no_op(),
        "init": _no_op(),
        "is_current_stream_capturing": lambda: False,
        "get_device_name": lambda device=None: _properties().name,
        "get_device_properties": _properties,
        "get_device_capability": lambda device=None: (9, 0),
        "default_generators": (torch.default_generator,),
        "get_rng_state": _get_rng_state,
        "set_rng_state": _set_rng_state,
        "manual_seed": _manual_seed,
        "manual_seed_all": lambda seed: _manual_seed(seed),
        "initial_seed": lambda: torch.default_generator.initial_seed(),
        "memory_allocated": lambda device=None: current(),
        "memory_reserved": lambda device=None: current(),
        "max_memory_allocated": lambda device=None: LEDGER.peak_bytes,
        "max_memory_reserved": lambda device=None: LEDGER.peak_bytes,
        "memory_stats": _memory_stats,
        "reset_peak_memory_stats": lambda device=None: LEDGER.reset_peak(),
        "mem_get_info": lambda device=None: (TOTAL_MEMORY_BYTES - current(), TOTAL_MEMORY_BYTES),
    }


def apply(patches: Patches) -> None:
    stand_ins = _stand_ins()
    for name, value in stand_ins.items():
        original = getattr(torch.cuda, name, None)
        patches.set(torch.cuda, name, value)
        for module in (torch.cuda.random, torch.cuda.memory):
            if vars(module).get(name, ...) is original:
                patches.set(module, name, value)
    for name in ("range_push", "range_pop", "mark"):
        patches.set(torch.cuda.nvtx, name, _no_op())
    # The real one refuses a simulated stream before a mode could answer; streams run in order.
    patches.set(torch.Tensor, "record_stream", _no_op())

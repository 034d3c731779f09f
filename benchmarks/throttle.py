"""Slows every checkpoint writer of a rank down to a rate, as a shared file system would.

Megatron's and nvidia-resiliency-ext's writers open files by a name of their modules, which is
replaced there; ours hands vectors to the kernel. All writes of one process share one clock. The
rate is in a file, so that workers that live on follow it.
"""

from __future__ import annotations

import builtins
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

VARIABLE = "VIME_OPTIM_BENCH_RATE_FILE"  # not a setting of the library; of the benchmark alone
_MODULES = (
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async",
)
_lock = threading.Lock()
_free_at_s = 0.0


def set_rate(bytes_per_s: float) -> None:
    """From now on; 0: as fast as it goes. Every rank of a machine sets the same."""
    path = os.environ.get(VARIABLE)
    if path:
        temporary = Path(f"{path}.{os.getpid()}")
        temporary.write_text(str(bytes_per_s))
        temporary.replace(path)
        enable()


def _pass(nbytes: int) -> None:
    """Take the time that these bytes would need."""
    global _free_at_s
    try:
        rate = float(Path(os.environ[VARIABLE]).read_text() or 0)
    except (OSError, ValueError, KeyError):
        return
    if not rate:
        return
    with _lock:
        _free_at_s = max(_free_at_s, time.monotonic()) + nbytes / rate
        until_s = _free_at_s
    time.sleep(max(0.0, until_s - time.monotonic()))


class _Throttled:
    """A file object whose writes take time."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Any) -> Any:
        written = self._file.write(data)
        _pass(memoryview(data).nbytes)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Throttled:
        self._file.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> Any:
        return self._file.__exit__(*exc_info)


def _open(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
    file = builtins.open(path, mode, *args, **kwargs)  # noqa: SIM115
    return _Throttled(file) if "w" in mode and str(path).endswith(".distcp") else file


def enable() -> None:
    """Wrap the writers that are imported (in a spawned worker: import them first)."""
    if "benchmarks.stall_rank" not in sys.modules and "megatron" not in sys.modules:
        import importlib

        for name in _MODULES:
            try:
                importlib.import_module(name)
            except ImportError:
                continue
    for name in _MODULES:
        module = sys.modules.get(name)
        if module is not None:
            module.open = _open  # type: ignore[attr-defined]
    fastfile: Any = sys.modules.get("vime_optim.files.fastfile")
    if fastfile is not None and not hasattr(fastfile, "_unthrottled"):
        fastfile._unthrottled = real = fastfile._write_views

        def write_views(fd: int, views: list[memoryview]) -> None:
            nbytes = sum(view.nbytes for view in views)
            real(fd, views)
            _pass(nbytes)

        fastfile._write_views = write_views

"""Times the parts of a phase: planning, staging, files, commit, reading, setting state.

The functions in TABLE are wrapped for as long as a phase runs, those of stock megatron-core and of
vime_optim alike; names that a release lacks are passed over. A part's time is wall time of the
thread that runs the phase, waiting for other ranks included. Where a part is called within another
one, its time is counted as its own alone, so that parts add up to no more than the phase.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_DCP = "megatron.core.dist_checkpointing"
_STRATEGIES = f"{_DCP}.strategies"
_OPTIMIZER = "megatron.core.optimizer"
_DISTRIBUTED = f"{_OPTIMIZER}.distrib_optimizer"

#: Parts in the order of the report.
PARTS = ("gather", "plan", "garbage", "staging", "files", "commit", "read", "weights", "state")

#: (module, qualified name, part).
TABLE = (
    # Building the state dict, and the template of a load.
    ("megatron.core.models.gpt.gpt_model", "GPTModel.sharded_state_dict", "plan"),
    (_DISTRIBUTED, "DistributedOptimizer.get_parameter_state_dp_zero", "gather"),
    (_DISTRIBUTED, "DistributedOptimizer.get_parameter_state_dp_reshardable", "plan"),
    ("vime_optim.reshard.engine", "build_param_state", "plan"),
    ("gc", "collect", "garbage"),
    # Saving. Functions that a module imported by name are listed where they are called too.
    (f"{_DCP}.serialization", "save_preprocess", "plan"),
    ("vime_optim.fixes.gather_free", "_compare_plans", "plan"),
    (
        f"{_STRATEGIES}.fully_parallel",
        "FullyParallelSaveStrategyWrapper.apply_saving_parallelization",
        "plan",
    ),
    (f"{_STRATEGIES}.torch", "mcore_to_pyt_state_dict", "plan"),
    (f"{_STRATEGIES}.torch", "save_state_dict_async_plan", "plan"),
    (f"{_STRATEGIES}.state_dict_saver", "save_state_dict_async_plan", "plan"),
    # Copies of host views (stock alone), and to which file each item goes.
    (f"{_STRATEGIES}.filesystem_async", "FileSystemWriterAsync.prepare_write_data", "staging"),
    (f"{_STRATEGIES}.filesystem_async", "FileSystemWriterAsync.preload_tensors", "staging"),
    ("vime_optim.commit.file_plan", "prepare_write_data", "staging"),
    (
        f"{_STRATEGIES}.filesystem_async",
        "FileSystemWriterAsync.write_preloaded_data_multithread",
        "files",
    ),
    (
        f"{_STRATEGIES}.filesystem_async",
        "FileSystemWriterAsync.write_preloaded_data_multiproc",
        "files",
    ),
    ("vime_optim.commit.task", "run", "files"),
    (f"{_STRATEGIES}.torch", "save_state_dict_async_finalize", "commit"),
    (f"{_STRATEGIES}.state_dict_saver", "save_state_dict_async_finalize", "commit"),
    (f"{_DCP}.serialization", "save_config", "commit"),
    ("vime_optim.commit.sessions", "open_session", "commit"),
    ("vime_optim.commit.sessions", "_after_commit", "commit"),
    # Loading.
    ("vime_optim.commit.load_check", "check_before_load", "plan"),
    (f"{_DCP}.serialization", "load_preprocess", "plan"),
    (f"{_DCP}.serialization", "load_common_state_dict", "plan"),
    (f"{_DCP}.serialization", "determine_global_metadata", "plan"),
    (f"{_DCP}.serialization", "validate_integrity_and_strict_load", "plan"),
    (f"{_STRATEGIES}.torch", "MCoreLoadPlanner.create_local_plan", "plan"),
    ("torch.distributed.checkpoint.filesystem", "FileSystemReader.read_metadata", "plan"),
    ("torch.distributed.checkpoint.filesystem", "FileSystemReader.read_data", "read"),
    ("vime_optim.reshard.storage", "read_data", "read"),
    # Taking what was loaded.
    ("torch.nn", "Module.load_state_dict", "weights"),
    (_DISTRIBUTED, "DistributedOptimizer.load_state_dict", "state"),
    (f"{_OPTIMIZER}.optimizer", "ChainedOptimizer.load_state_dict", "state"),
)


class Clock:
    """Seconds by part, of the thread that made it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._running: list[str] = []
        self._since_s = 0.0
        self._thread = threading.get_ident()

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Count the time of the block as `part`, but for what parts within it take."""
        if threading.get_ident() != self._thread:
            yield
            return
        self._charge()
        self._running.append(part)
        try:
            yield
        finally:
            self._charge()
            self._running.pop()

    def _charge(self) -> None:
        now_s = time.perf_counter()
        if self._running:
            part = self._running[-1]
            self.seconds[part] = self.seconds.get(part, 0.0) + now_s - self._since_s
        self._since_s = now_s


@contextmanager
def timed(clock: Clock, table: tuple[tuple[str, str, str], ...] = TABLE) -> Iterator[None]:
    """Wrap what the table names, and put everything back in the end."""
    undo: list[Callable[[], None]] = []
    try:
        for module, name, part in table:
            restore = _wrap(clock, module, name, part)
            if restore is not None:
                undo.append(restore)
        yield
    finally:
        for restore in reversed(undo):
            restore()


def _wrap(clock: Clock, module: str, name: str, part: str) -> Callable[[], None] | None:
    """Wrap one function; returns what undoes it, None where there is no such function."""
    *path, attribute = name.split(".")
    try:
        owner = functools.reduce(getattr, path, importlib.import_module(module))
        found = inspect.getattr_static(owner, attribute)
    except (ImportError, AttributeError):
        return None
    was_own = attribute in vars(owner)
    is_static = isinstance(found, staticmethod)
    original: Any = found.__func__ if is_static else found

    @functools.wraps(original)
    def timing(*args: Any, **kwargs: Any) -> Any:
        with clock.within(part):
            return original(*args, **kwargs)

    def restore() -> None:
        if was_own:
            setattr(owner, attribute, found)
        else:
            delattr(owner, attribute)

    setattr(owner, attribute, staticmethod(timing) if is_static else timing)
    return restore

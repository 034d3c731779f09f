"""An optimizer that is half loaded must not be trained on, nor saved.

torch's checkpoint reader writes into the optimizer's own tensors. From the first byte that it may
have read until the optimizer has taken all that was loaded (load_state_dict), its state is neither
the old one nor the new.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from vime_optim.commit.agreement import Operation
from vime_optim.errors import OptimizerStateError
from vime_optim.optimizer.kinds import has_buffers, is_stub, members, owned_params
from vime_optim.optimizer.record import record_of
from vime_optim.state_dicts import walk

_thread = threading.local()


@contextmanager
def into(template: Any, directory: str, operation: Operation | None) -> Iterator[None]:
    """Around a load: its optimizers count as half loaded from when the reading begins.

    Where the load fails on some ranks before they read, and on others after, all count as such.
    """
    outer = getattr(_thread, "load", None)
    load = _thread.load = _Load(list(_members(template)), directory)
    try:
        yield
    except BaseException:
        if operation is not None and operation.error is not None and not operation.is_broken:
            with suppress(Exception):
                if operation.check(values=(int(load.has_begun),))[0]:
                    load.begin()
        raise
    finally:
        _thread.load = outer


class _Load:
    def __init__(self, optimizers: list[Any], directory: str) -> None:
        self.optimizers = optimizers
        self.directory = directory
        self.has_begun = False
        self.parsed: dict[tuple[Any, ...], Any] = {}

    def begin(self) -> None:
        self.has_begun = True
        for optimizer in self.optimizers:
            if not _is_empty(optimizer):
                record_of(optimizer).half_loaded_from = self.directory


def _is_empty(optimizer: Any) -> bool:
    """Whether it holds no shard on this rank: nothing is loaded, and Megatron drops its {}."""
    if is_stub(optimizer):
        return True
    shards = hasattr(optimizer, "gbuf_ranges") and has_buffers(optimizer)
    return shards and next(iter(owned_params(optimizer)), None) is None


def _members(template: Any) -> Iterator[Any]:
    """The optimizers whose state is in a template."""
    for _, value in walk(template):
        owner = getattr(value, "owner", None) if isinstance(value, dict) else None
        if owner is not None:
            yield from members(owner)


def once(path: str, parse: Callable[[], Any]) -> Any:
    """What `parse` makes of the file, made once in a load. torch reads `.metadata` two or three
    times, and with a hundred thousand shards each reading takes seconds."""
    load = getattr(_thread, "load", None)
    if load is None:
        return parse()
    found = os.stat(path)
    key = (path, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
    if key not in load.parsed:
        load.parsed = {key: parse()}
    return load.parsed[key]


def reading_begins() -> None:
    """Called when all is planned."""
    load = getattr(_thread, "load", None)
    if load is not None:
        load.begin()


def taken(optimizer: Any) -> None:
    """The optimizer has taken its whole state."""
    record_of(optimizer).half_loaded_from = None


def require_whole(optimizer: Any, action: str) -> None:
    """
    Raises:
        OptimizerStateError: a load into the optimizer, or into a member of it, began and was not
            finished.
    """
    for member in members(optimizer):
        directory = record_of(member).half_loaded_from
        if directory is not None:
            raise OptimizerStateError(
                f"this optimizer cannot be {action}: a load into it was not finished, so that its"
                " state is half of one checkpoint",
                where=str(directory),
                got="a load that failed, or whose result load_state_dict() was not called with",
                expected="optimizer.load_state_dict(loaded['optimizer'])",
                next_step="load a whole checkpoint; or leave the optimizer out of what is loaded",
            )

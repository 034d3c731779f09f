"""Records what reaches the disk in which order, and lets the n-th of these calls fail."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

Event = tuple[str, str]


def _name(fd_or_path: Any) -> str:
    path = os.readlink(f"/proc/self/fd/{fd_or_path}") if isinstance(fd_or_path, int) else fd_or_path
    return os.fspath(path)


class Recorder:
    """`events`: ("sync", path), ("rename", new path), ("write", path) as they happen.

    With `fail_at` = n the n-th of them (from 0) raises ENOSPC instead and is the last one noted.
    """

    def __init__(self, fail_at: int | None = None) -> None:
        self.events: list[Event] = []
        self._fail_at = fail_at

    @property
    def failed(self) -> bool:
        return self._fail_at is not None and len(self.events) > self._fail_at

    def note(self, kind: str, path: str) -> None:
        self.events.append((kind, path))
        if len(self.events) - 1 == self._fail_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def names(self, kind: str) -> list[str]:
        return [Path(path).name for event, path in self.events if event == kind]


@contextmanager
def recorded(fail_at: int | None = None) -> Iterator[Recorder]:
    """os.fsync, os.write, os.writev, os.rename and os.replace are recorded in this block."""
    recorder = Recorder(fail_at)

    def noting(kind: str, real: Callable[..., Any], argument: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            recorder.note(kind, _name(args[argument]))
            return real(*args, **kwargs)

        return call

    with (
        mock.patch.object(os, "fsync", noting("sync", os.fsync, 0)),
        mock.patch.object(os, "write", noting("write", os.write, 0)),
        mock.patch.object(os, "writev", noting("write", os.writev, 0)),
        mock.patch.object(os, "rename", noting("rename", os.rename, 1)),
        mock.patch.object(os, "replace", noting("rename", os.replace, 1)),
    ):
        yield recorder

"""One verify job at a time in a directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from vime_optim.errors import VerifyError

LOCK_NAME = ".vime-verify.lock"


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the directory for this process; ends with the process, however it ends.

    Raises:
        VerifyError: another process holds it.
    """
    path = directory / LOCK_NAME
    with path.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise VerifyError(
                "another verify job works in this directory",
                where=str(directory),
                got=f"{LOCK_NAME} held by process {lock.read().strip() or '(unknown)'}",
                next_step="wait for it to end, or choose another --dir",
            ) from None
        lock.seek(0)
        lock.truncate()
        lock.write(str(os.getpid()))
        lock.flush()
        yield

"""The lock on a directory that is being saved to."""

from __future__ import annotations

import fcntl
import os
from typing import ClassVar


class DirectoryLock:
    """A directory that this process saves to; shared by its saves that overlap.

    The directory itself is locked: a lock file would be taken for an old checkpoint's rest.
    """

    _held: ClassVar[dict[str, DirectoryLock]] = {}

    def __init__(self, key: str, fd: int) -> None:
        self.key = key
        self.sessions = 0
        self._fd = fd

    @classmethod
    def of(cls, directory: str) -> DirectoryLock:
        """The lock, taken.

        Raises:
            RuntimeError: another process has it.
        """
        key = os.path.realpath(directory)
        lock = cls._held.get(key)
        if lock is None or not lock.is_of(directory):
            lock = cls._held[key] = cls(key, _lock_directory(directory))
        lock.sessions += 1
        return lock

    def is_of(self, directory: str) -> bool:
        """Whether the locked directory is still the one of that name."""
        try:
            return self._fd >= 0 and os.path.samestat(os.stat(directory), os.fstat(self._fd))
        except OSError:
            return False

    def release(self) -> None:
        self.sessions -= 1
        if self.sessions:
            return
        if self._fd >= 0:
            os.close(self._fd)
        if self._held.get(self.key) is self:
            del self._held[self.key]


def _lock_directory(directory: str) -> int:
    """A locked descriptor, -1 where that cannot be had."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return -1  # the probe, or the save itself, says what is wrong with it
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise RuntimeError(
            "another save is writing to it: a second job, or a writer of an earlier save"
        ) from None
    except OSError:
        os.close(fd)  # this file system has no locks
        return -1
    # Forked writers inherit the lock: it holds until the last of them is gone.
    return fd

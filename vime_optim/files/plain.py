"""Bounded reads of plain files: never a pipe, a device or a folder, never more than asked for."""

from __future__ import annotations

import os
import stat

from vime_optim.errors import CheckpointError


def read_plain(path: str | os.PathLike[str], limit_bytes: int) -> bytes:
    """All bytes of a file; links are followed, as what they lead to is looked at.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: it is no plain file, is larger than `limit_bytes`, or cannot be read.
    """
    try:
        # A pipe that nobody writes to would hold up a blocking open for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        status = os.fstat(descriptor)
        require_plain(path, status.st_mode)
        if status.st_size > limit_bytes:
            raise too_large(os.fspath(path), f"{status.st_size}", limit_bytes)
        with os.fdopen(os.dup(descriptor), "rb") as file:
            return file.read(status.st_size)
    except OSError as error:
        raise _unreadable(path, error) from error
    finally:
        os.close(descriptor)


def require_plain(path: str | os.PathLike[str], mode: int) -> None:
    """Raises CheckpointError unless `mode`, of os.stat, is a regular file's."""
    if not stat.S_ISREG(mode):
        raise CheckpointError(
            "A file of the checkpoint is no plain file.",
            where=os.fspath(path),
            got=_kind_of(mode),
            expected="a regular file",
            next_step="Check who can write to this directory; nothing was read from it.",
        )


def _kind_of(mode: int) -> str:
    kinds = (
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
        (stat.S_ISSOCK, "a socket"),
    )
    return next((name for test, name in kinds if test(mode)), "something else")


def too_large(where: str, got: str, limit_bytes: int) -> CheckpointError:
    """The error for a file that holds more than it should."""
    return CheckpointError(
        "A file of the checkpoint is too large for what it should hold.",
        where=where,
        got=f"{got} bytes",
        expected=f"at most {limit_bytes} bytes",
        next_step="Check that this directory is a Megatron checkpoint.",
    )


def _unreadable(path: str | os.PathLike[str], error: OSError) -> CheckpointError:
    return CheckpointError(
        "A file of the checkpoint cannot be read.",
        where=os.fspath(path),
        got=f"{type(error).__name__}: {error.strerror}",
        next_step="Check the path and its permissions.",
    )

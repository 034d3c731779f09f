"""Small files: read with a bound, never from a pipe, a device or a folder; written whole or not."""

from __future__ import annotations

import contextlib
import os
import stat

from vime_optim.errors import CheckpointError, one_line


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
        raise unreadable(path, error) from error
    try:
        status = os.fstat(descriptor)
        require_plain(path, status.st_mode)
        if status.st_size > limit_bytes:
            raise too_large(os.fspath(path), f"{status.st_size}", limit_bytes)
        with os.fdopen(os.dup(descriptor), "rb") as file:
            return file.read(status.st_size)
    except OSError as error:
        raise unreadable(path, error) from error
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


def unreadable(path: str | os.PathLike[str], error: OSError) -> CheckpointError:
    """The error for a file, and perhaps the key in it, that the system does not let us read."""
    return CheckpointError(
        "A file of the checkpoint cannot be read.",
        where=os.fspath(path),
        got=f"{type(error).__name__}: {error.strerror}",
        next_step="Check the path and its permissions.",
    )


def no_archive(where: str, error: Exception) -> CheckpointError:
    """The error for what should be a torch.save archive, by the error of whoever tried to read it.

    A hostile file may make readers raise anything at all; it all means the same.
    """
    return CheckpointError(
        "A tensor or object of the checkpoint cannot be read as a torch.save archive.",
        where=where,
        got=one_line(error),
        expected="a zip archive written by torch.save, whole and uncompressed",
        next_step="Copy the file again from its source; if that is the same, it is damaged.",
    )


def write_new(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file that does not exist, and bring it to stable storage."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write or replace a small file, whole or not at all, and bring it and its name to storage."""
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.part")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    write_new(temporary, data)
    os.replace(temporary, path)
    sync_directory(folder or os.curdir)


def sync_directory(directory: str | os.PathLike[str]) -> None:
    """Make the names in a directory durable, where the file system can."""
    with contextlib.suppress(OSError):  # some of networks cannot; the files themselves are synced
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

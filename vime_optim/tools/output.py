"""New directories: written beside their target under another name, and renamed when whole."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vime_optim.errors import CheckpointError
from vime_optim.files.plain import sync_directory

try:
    import fcntl
except ImportError:  # pragma: no cover - not on Windows
    fcntl = None  # type: ignore[assignment]

_FICLONE = 0x40049409
"""ioctl that shares a file's blocks (linux/fs.h); Btrfs, XFS and bcachefs know it."""

_COPY_BYTES = 4 * 1024 * 1024


def refuse_existing(target: Path) -> None:
    """Raises CheckpointError unless the target is missing or an empty directory."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise CheckpointError(
            "The output exists and is not a directory.",
            where=str(target),
            next_step="Name another.",
        )
    if target.is_dir() and any(target.iterdir()):
        raise CheckpointError(
            "The output directory is not empty.",
            where=str(target),
            next_step="Name a new one; nothing is ever overwritten.",
        )


def refuse_inside(source: Path, target: Path) -> None:
    """Raises CheckpointError where the output would change the input's directory."""
    inner, outer = target.resolve(), source.resolve()
    if inner == outer or outer in inner.parents:
        raise CheckpointError(
            "The output lies inside the input, which is never written to.",
            where=str(target),
            next_step="Name a directory somewhere else.",
        )


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A temporary directory beside `target` that takes its name when the block ends well.

    Raises:
        CheckpointError: the target is in use, or cannot be written.
    """
    refuse_existing(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise _cannot_write(target, error) from error
    try:
        yield folder
        sync_directory(folder)
        os.chmod(folder, 0o777 & ~_umask())
        os.rename(folder, target)  # an empty target is replaced, one filled meanwhile is not
        sync_directory(target.parent)
    except OSError as error:
        raise _cannot_write(target, error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _cannot_write(target: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        "The output cannot be written.",
        where=str(target),
        got=error.strerror or str(error),
        next_step="Check the free space and the permissions.",
    )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def share_file(source: int, original: Path, target: Path, *, link: bool = True) -> str:
    """Puts a file of the input into the output without a second copy where that can be.

    Args:
        source: descriptor of the file, open for reading.
        original: its path, for a hard link.
        link: whether a hard link will do.

    Returns:
        "hard link", "reflink" or "copy".
    """
    if link:
        try:
            os.link(original, target, follow_symlinks=False)
            if os.path.samestat(os.stat(target), os.fstat(source)):
                return "hard link"
            os.unlink(target)  # somebody exchanged the file under its name
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
                raise
    with target.open("xb") as file:
        how = "reflink" if _reflink(source, file.fileno()) else "copy"
        position = 0
        while how == "copy" and (block := os.pread(source, _COPY_BYTES, position)):
            file.write(block)
            position += len(block)
        file.flush()
        os.fsync(file.fileno())  # a reflink is metadata that must be on the disk, too
    return how


def _reflink(source: int, target: int) -> bool:
    if fcntl is None:
        return False
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:
        return False
    return True

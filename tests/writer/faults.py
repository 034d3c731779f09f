"""Faults of the file system for the file writer, in ranks and in the workers that they start.

A data file is always a new file, so a pipe or a link that lies under its name beforehand does not
reach the writer. Instead a mark beside it says what its creation does. Names are stock's, without
the random part.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from vime_optim.files import fastfile

_real_create_new = fastfile.create_new


def _mark(directory: Path, name: str) -> Path:
    return directory / f".fault_{name}"


def block(directory: Path, name: str) -> Path:
    """The writer of a file stays in open() until the mark that is returned is removed."""
    return _set(directory, name, "block")


def fill(directory: Path, name: str) -> Path:
    """The writer of a file finds no space left on the device."""
    return _set(directory, name, "full")


def _set(directory: Path, name: str, kind: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    mark = _mark(directory, name)
    mark.write_text(kind)
    return mark


def _create_new(path: str | os.PathLike[str]) -> int:
    path = Path(path)
    mark = _mark(path.parent, re.sub(r"(__\d+_)[0-9a-f]{8}_", r"\1", path.name))
    if mark.exists() and mark.read_text() == "full":
        return os.open("/dev/full", os.O_WRONLY | os.O_CLOEXEC)
    while mark.exists():
        time.sleep(0.01)
    return _real_create_new(path)


def enable() -> None:
    """Called once in each process of a launch."""
    fastfile.create_new = _create_new

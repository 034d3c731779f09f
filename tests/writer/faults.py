"""Faults of the file system for the file writer, in ranks and in the workers that they start.

A data file is always a new file, so a pipe or a link that lies under its name beforehand does not
reach the writer. Instead a mark beside it says what its creation does.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from vime_optim.writer import fastfile

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
    for directory in (path.parent, path.parent.parent):
        mark = _mark(directory, path.name)
        try:
            kind = mark.read_text()
        except FileNotFoundError:
            continue
        if kind == "full":
            return os.open("/dev/full", os.O_WRONLY | os.O_CLOEXEC)
        while mark.exists():
            time.sleep(0.01)
    return _real_create_new(path)


def enable() -> None:
    """Called once in each process of a launch."""
    fastfile.create_new = _create_new

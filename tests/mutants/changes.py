"""The list of changes: read from `*.yml`, found in their files by text, made and undone.

An entry of a list holds

    name    what the change does, in words
    file    a file of the package
    old     text that the file holds exactly once; of several lines, without their common indent
    new     what stands there instead
    test    the test that must notice, or several, as pytest takes them
    equal   (optional) why nobody can notice: then the tests must pass
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent
_KEYS = {"name", "file", "old", "new", "test"}


class ChangeError(Exception):
    """A change that cannot be made."""


@dataclass(frozen=True)
class Change:
    """One change; see the module."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    equal: str | None = None

    def applied_to(self, text: str) -> str:
        """The file's text with the change made.

        Raises:
            ChangeError: the old text is not there exactly once.
        """
        spelled = list(dict.fromkeys(_at_every_depth(self.old, self.new)))
        found = [(old, new) for old, new in spelled if text.count(old)]
        times = sum(text.count(old) for old, _ in found)
        if times != 1:
            raise ChangeError(f"its text is {times} times in {self.file}: {self.old!r}")
        ((old, new),) = found
        return text.replace(old, new)

    @contextmanager
    def made_in(self, tree: Path) -> Iterator[None]:
        """The change is in the tree in this block."""
        path = tree / self.file
        before = path.read_text()
        path.write_text(self.applied_to(before))
        try:
            yield
        finally:
            path.write_text(before)


def _at_every_depth(old: str, new: str) -> Iterator[tuple[str, str]]:
    """Both texts indented by 0, 4, ... columns; of one line there is only one spelling."""
    if "\n" not in old.rstrip("\n"):
        yield old.rstrip("\n"), new.rstrip("\n")
        return
    for depth in range(0, 33, 4):
        pair = []
        for text in (old, new):
            lines = [" " * depth + line if line else "" for line in text.rstrip("\n").split("\n")]
            pair.append("\n" + "\n".join(lines) + "\n")
        yield pair[0], pair[1]


def read_changes() -> list[Change]:
    """All changes of all lists, in order.

    Raises:
        ChangeError: an entry has other keys than those above.
    """
    changes = []
    for path in sorted(FOLDER.glob("*.yml")):
        for entry in yaml.safe_load(path.read_text()):
            changes.append(_change(entry, path.name))
    return changes


def _change(entry: dict[str, Any], where: str) -> Change:
    if not entry.keys() >= _KEYS or entry.keys() - _KEYS - {"equal"}:
        raise ChangeError(f"{where}: an entry has the keys {sorted(entry)}")
    tests = entry["test"] if isinstance(entry["test"], list) else [entry["test"]]
    return Change(
        entry["name"],
        entry["file"],
        str(entry["old"]),
        str(entry["new"]),
        tuple(tests),
        entry.get("equal"),
    )

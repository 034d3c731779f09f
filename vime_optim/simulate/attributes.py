"""Set attributes and put them back."""

from __future__ import annotations

from typing import Any

_MISSING = object()


class Patches:
    """Attributes set on modules and classes, in order, with what each owner held itself."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, object]] = []

    def set(self, owner: Any, name: str, value: object) -> None:
        self._originals.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def undo(self) -> None:
        while self._originals:
            owner, name, original = self._originals.pop()
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)

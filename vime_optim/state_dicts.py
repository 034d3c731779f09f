"""The one walk over a state dict: dicts and lists, as Megatron nests them, however deep.

A state dict may hold an optimizer's state in whatever place its caller put it. Containers that are
met again, in a circle say, are entered once.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

Path = tuple[Any, ...]
"""The keys that lead to a value."""

PLAIN = (int, float, bool, str, bytes, type(None))
"""What a list may hold millions of, and no walk asks for."""


class MadeDict(dict[Any, Any]):
    """A state dict with attributes that say how it was made.

    A copy, deep or not, has the same attributes, as they lead to the optimizer. Pickled it is a
    plain dict, as Megatron's own is.
    """

    def __copy__(self) -> MadeDict:
        return self._with(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> MadeDict:
        return self._with({key: copy.deepcopy(value, memo) for key, value in self.items()})

    def _with(self, items: dict[Any, Any]) -> MadeDict:
        made = type(self)(items)
        vars(made).update(vars(self))
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def walk(state: Any, leaves: type | tuple[type, ...] = ()) -> Iterator[tuple[Path, Any]]:
    """Every value with its path, a container before what it holds; not the numbers and texts in
    containers, of which lists may hold millions.

    Args:
        leaves: containers of these types are given, and not entered.
    """
    seen: set[int] = set()
    waiting: list[tuple[Path, Any]] = [((), state)]
    while waiting:
        path, value = waiting.pop()
        yield path, value
        if isinstance(value, leaves) or not isinstance(value, (dict, list)) or id(value) in seen:
            continue
        seen.add(id(value))
        held = value.items() if isinstance(value, dict) else enumerate(value)
        found = [((*path, key), item) for key, item in held if type(item) not in PLAIN]
        waiting += reversed(found)


def replaced(state: Any, path: Path, value: Any) -> Any:
    """A state dict with another value at `path`; the caller's own stays as it is."""
    if not path:
        return value
    changed = replaced(state[path[0]], path[1:], value)
    if isinstance(state, list):
        return [*state[: path[0]], changed, *state[path[0] + 1 :]]
    return {**state, path[0]: changed}


def copied(state: Any) -> Any:
    """The same in containers of its own, shared ones still shared; what they hold is the same."""
    return _copied(state, {})


def _copied(state: Any, made: dict[int, Any]) -> Any:
    if not isinstance(state, (dict, list)):
        return state
    if id(state) not in made:
        own = made[id(state)] = copy.copy(state)
        for key, value in list(own.items() if isinstance(own, dict) else enumerate(own)):
            own[key] = _copied(value, made)
    return made[id(state)]

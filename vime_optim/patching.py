"""Replaces one attribute of a class or module, and gives it back exactly."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass
class Patch:
    """One attribute that was replaced, with what undoing it takes."""

    owner: Any
    attribute: str
    original: Any
    was_own: bool
    replacement: Any

    def undo(self) -> None:
        if self.was_own:
            setattr(self.owner, self.attribute, self.original)
        else:
            delattr(self.owner, self.attribute)

    @property
    def path(self) -> str:
        return f"{_owner_name(self.owner)}.{self.attribute}"

    def current(self) -> Any:
        return self.owner.__dict__.get(self.attribute)

    def is_intact(self) -> bool:
        return self.current() is self.replacement


def replace(
    owner: Any, attribute: str, make: Callable[[Callable[..., Any]], Callable[..., Any]], fix: str
) -> list[Patch]:
    """Put `make(function)` in the place of the function that `owner.attribute` is.

    A function of a module is replaced in every module that imported it by name, too.

    Args:
        fix: the id that marks the replacement as ours.
    """
    was_own = attribute in vars(owner)
    raw = raw_attribute(owner, attribute)
    function = function_of(raw)
    wrapped = make(function)
    functools.update_wrapper(wrapped, function)
    wrapped.__vime_optim__ = fix  # type: ignore[attr-defined]
    replacement = type(raw)(wrapped) if isinstance(raw, (staticmethod, classmethod)) else wrapped
    patches = [Patch(owner, attribute, raw, was_own, replacement)]
    if isinstance(owner, ModuleType):
        patches += [
            Patch(module, attribute, raw, True, replacement)
            for module in _aliases(owner, attribute, raw)
        ]
    for patch in patches:
        setattr(patch.owner, patch.attribute, patch.replacement)
    return patches


def undo(patches: Sequence[Patch]) -> None:
    """Give every attribute back, also to modules that imported a replacement by name since."""
    for patch in reversed(patches):
        patch.undo()
    _restore_later_aliases(patches)


def raw_attribute(owner: Any, attribute: str) -> Any:
    """The attribute as stored (a staticmethod object, say), also when it is inherited."""
    if owner is None:
        return None
    for holder in getattr(owner, "__mro__", (owner,)):
        if attribute in vars(holder):
            return vars(holder)[attribute]
    return None


def function_of(raw: Any) -> Any:
    return raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw


def _aliases(owner: ModuleType, attribute: str, raw: Any) -> list[ModuleType]:
    """Modules that imported this very function by name; Megatron's packages re-export many."""
    found = []
    for module in list(sys.modules.values()):
        if module is owner or not isinstance(module, ModuleType):
            continue
        if vars(module).get(attribute) is raw:
            found.append(module)
    return found


def _restore_later_aliases(patches: Sequence[Patch]) -> None:
    """Give back the original to modules that imported a replacement by name after install()."""
    functions = [patch for patch in patches if isinstance(patch.owner, ModuleType)]
    original_of = {id(patch.replacement): patch.original for patch in functions}
    for attribute in {patch.attribute for patch in functions}:
        for module in list(sys.modules.values()):
            if not isinstance(module, ModuleType):
                continue
            found = held = vars(module).get(attribute)
            while id(held) in original_of:
                held = original_of[id(held)]
            if held is not found:
                setattr(module, attribute, held)


def describe(value: Any) -> str:
    """A replacement of one of ours, for a report; a wrapper may still call ours."""
    function = function_of(value)
    name = f"{getattr(function, '__module__', None)}.{getattr(function, '__qualname__', None)}"
    code = getattr(function, "__code__", None)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else repr(value)


def _owner_name(owner: Any) -> str:
    if isinstance(owner, ModuleType):
        return owner.__name__
    return f"{owner.__module__}.{owner.__qualname__}"

"""What takes a function's place is called as that function is: by its parameters' names, too."""

from __future__ import annotations

import importlib
import inspect
from typing import Any


def compared(payload: dict[str, Any]) -> dict[str, Any]:
    """Targets that were compared, and those whose replacement calls a parameter otherwise."""
    from vime_optim.fixes import FIXES
    from vime_optim.patching import function_of, raw_attribute

    compared, differ = [], []
    for target in (target for fix in FIXES for target in fix.targets):
        try:
            owner: Any = importlib.import_module(target.module)
        except ImportError:
            continue
        *path, attribute = target.name.split(".")
        for part in path:
            owner = getattr(owner, part, None)
        original = function_of(raw_attribute(owner, attribute))
        if not inspect.isfunction(original) or isinstance(target.wrap, str):
            continue
        given = _named(_body_of(target.wrap, original))
        taken = _named(inspect.unwrap(original))
        compared.append(str(target))
        if given[: len(taken)] != taken[: len(given)]:
            differ.append(str(target))
    return {"compared": compared, "differ": differ}


def _body_of(wrap: Any, original: Any) -> Any:
    """Without the two parameters that `Fix.wraps` puts before those of the call."""
    body = inspect.getclosurevars(wrap).nonlocals.get("body")
    if body is None:
        return wrap(original, lambda: None)
    parameters = list(inspect.signature(body).parameters.values())[2:]

    def stand_in() -> None: ...

    stand_in.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return stand_in


def _named(function: Any) -> list[str]:
    """Parameters that may be given by name, up to the first that takes the rest."""
    named = []
    for parameter in inspect.signature(function, follow_wrapped=False).parameters.values():
        if parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
            break
        named.append(parameter.name)
    return named

"""Calls back when a module is wholly imported, also when its import has begun already.

install() may stand at the top of a module of Megatron: that module, and those that are waiting for
it, are in sys.modules then without most of their names.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import wrapt

Hook = Callable[[ModuleType], None]


def is_loaded(name: str) -> bool:
    """True when the module is imported, not just begun."""
    return name in sys.modules and not is_half_made(name)


def is_half_made(name: str) -> bool:
    """True while the module's own code is running."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def when_imported(name: str, hook: Hook) -> None:
    """Call `hook(module)` once, at the end of the module's import or, if it is imported, now.

    What the hook raises, the import statement raises.
    """
    if is_half_made(name):
        _watch(sys.modules[name].__spec__, functools.partial(_finished, name, hook))
    else:
        wrapt.register_post_import_hook(hook, name)


def _finished(name: str, hook: Hook) -> None:
    if name not in sys.modules:  # that import failed; the next one may not
        wrapt.register_post_import_hook(hook, name)
        return
    try:
        hook(sys.modules[name])
    except BaseException:
        del sys.modules[name]  # as after any import that raises
        raise


class _Watched:
    """Mixed into the class of one spec: importlib marks the end of the import in an attribute."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            done = self.__dict__.pop("_vime_optim_done")
            self.__class__ = self.__dict__.pop("_vime_optim_class")
            for call in done:
                call()


def _watch(spec: ModuleSpec | None, call: Callable[[], None]) -> None:
    assert spec is not None
    if isinstance(spec, _Watched):
        spec.__dict__["_vime_optim_done"].append(call)
        return
    plain = type(spec)
    spec.__dict__.update(_vime_optim_done=[call], _vime_optim_class=plain)
    spec.__class__ = type(plain.__name__, (_Watched, plain), {})

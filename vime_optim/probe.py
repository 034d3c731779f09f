"""Looks at Megatron's code without running it: sources, signatures and foreign patches."""

from __future__ import annotations

import inspect
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any


def source_of(function: Any) -> str:
    """Source text of a function, without its decorators' wrappers; '' when there is none."""
    try:
        return inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):
        return ""


def has_patch(code: Any, name: str) -> bool:
    """True when a function or module carries the marker of one of our patches (patches/)."""
    return f"vime_optim: {name}" in source_of(code)


def parameters_of(function: Any) -> tuple[str, ...]:
    """Parameter names of a function, in order; () when they cannot be told."""
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


def bind(function: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Arguments by name, with those of **kwargs beside the others."""
    signature = inspect.signature(function)
    bound = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound.update(bound.pop(name, {}))
    return bound


def missing_parameters(function: Any, *needed: str) -> str:
    """A reason when the function lacks one of the `needed` parameters, else ''."""
    have = parameters_of(function)
    if any(name == "kwargs" for name in have):
        return ""
    lacking = [name for name in needed if name not in have]
    return f"parameters {have} lack {', '.join(lacking)}" if lacking else ""


def missing_words(function: Any, *needed: str) -> str:
    """A reason when the function's source lacks one of the `needed` texts, else ''."""
    source = source_of(function)
    lacking = [text for text in needed if text not in source]
    return f"{lacking[0]} is not in its source" if lacking else ""


def describe_foreign_layer(function: Any, module: ModuleType) -> str | None:
    """Name the first wrapper of `function` that neither Megatron, torch nor Python wrote.

    A method may be decorated (torch.no_grad, functools); each layer is followed by __wrapped__.
    A layer whose code lies in another project's file is somebody's run-time patch.
    """
    trusted = _trusted_roots(module)
    layer = function
    while layer is not None:
        code = getattr(layer, "__code__", None)
        if code is not None:
            path = Path(code.co_filename)
            if not _is_python_own(path) and not any(
                root == path or root in path.parents for root in trusted
            ):
                return f"{getattr(layer, '__qualname__', layer)} from {path.name} ({path})"
        elif not callable(layer) and not isinstance(layer, property):
            return f"a {type(layer).__name__}"
        layer = getattr(layer, "__wrapped__", None)
    return None


def _trusted_roots(module: ModuleType) -> list[Path]:
    roots = [Path(__file__).parent]
    file = getattr(module, "__file__", None)
    if file is not None:
        # The package that the module belongs to: everything under .../megatron/ is Megatron's.
        depth = module.__name__.count(".")
        path = Path(file)
        parents = path.parents
        up = depth if path.name == "__init__.py" else depth - 1
        roots.append(parents[max(0, min(up, len(parents) - 1))])
        roots.append(path)
    import torch

    roots.append(Path(torch.__file__).parent)
    return roots


def _is_python_own(path: Path) -> bool:
    # Outside a virtual environment site-packages lies below the standard library's folder.
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    return stdlib in path.parents and not {"site-packages", "dist-packages"} & set(path.parts)

"""An importable `triton` that does nothing: megatron-core 0.18 and later import it at the top."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any


class _Stub(types.ModuleType):
    """A module of triton and any name in it: a decorator, its factory, a type in an annotation."""

    # Older than any release that megatron's kernels accept, so that they leave themselves out.
    __version__ = "0.0.0"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        decorates = len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType)
        return args[0] if decorates else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Stub(name)

    def __getitem__(self, key: object) -> Any:
        return self


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "triton" or name.startswith("triton."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def provide_triton() -> None:
    """Makes `import triton` work where triton is not installed; torch still knows it as absent."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if importlib.util.find_spec("triton") is not None:
        return
    import torch.utils._triton

    torch.utils._triton.has_triton_package()  # caches its answer
    sys.meta_path.append(_Finder())

"""Objects that a checkpoint stores by torch.save, read in a job under weights_only.

The names that count are torch's own, Megatron's (megatron.core.safe_globals, whether registered or
not), and those that the user allowed. Any other class stands for nothing: as an option of a param
group it is dropped (fault F9), anywhere else it is refused.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import io
import pathlib
import signal
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vime_optim.errors import CheckpointError
from vime_optim.files.plain import no_archive
from vime_optim.files.safe_load import audited_names, walk
from vime_optim.files.stand_ins import Inert, inert_class, is_inert_class

OBJECT_LIMIT_BYTES = 1 << 30


def load_object(data: bytes | memoryview, where: str) -> Any:
    """What torch.load gives for the bytes of a stored object.

    Args:
        data: a torch.save archive.
        where: its key, for errors.

    Raises:
        CheckpointError: it is no whole archive, is hostile, or needs a class that is not allowed.
    """
    try:
        names = audited_names(data, OBJECT_LIMIT_BYTES)
        with also_allowed([*_megatrons(), *_stand_ins(names)]):
            loaded = torch.load(io.BytesIO(data), weights_only=True)
        drop_classes(loaded, where)
        return loaded
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        raise no_archive(where, error) from None


@contextmanager
def also_allowed(entries: Iterable[Any]) -> Iterator[None]:
    """weights_only allows these too in this block. torch's own context takes away in the end what
    it was given, and Megatron, the user or a block around it may have allowed the same before."""
    known = torch.serialization.get_safe_globals()
    with torch.serialization.safe_globals([entry for entry in entries if entry not in known]):
        yield


def _stand_ins(names: set[str]) -> list[tuple[Any, str]]:
    known = {_name_of(entry) for entry in torch.serialization.get_safe_globals()}
    known |= {_name_of(entry) for entry in _megatrons()}
    known |= _torchs()
    return [(inert_class(name), name) for name in sorted(names - known)]


@functools.cache
def _torchs() -> frozenset[str]:
    return frozenset(torch._weights_only_unpickler._get_allowed_globals())


def _name_of(entry: Any) -> str:
    if isinstance(entry, tuple):
        return str(entry[1])
    return f"{entry.__module__}.{entry.__qualname__}"


@functools.cache
def _megatrons() -> tuple[Any, ...]:
    """What Megatron allows, by its own list where it has one, and what its objects hold."""
    import numpy as np

    multiarray: Any = getattr(np, "_core", np).multiarray
    entries: list[Any] = [
        argparse.Namespace,
        types.SimpleNamespace,
        io.BytesIO,
        signal.Signals,
        pathlib.PosixPath,
        torch._C.Generator,
        np.ndarray,
        np.dtype,
        *(type(np.dtype(code)) for code in "?bBhHiIlLqQefd"),
    ]
    for module in ("numpy._core.multiarray", "numpy.core.multiarray"):
        entries.append((multiarray._reconstruct, f"{module}._reconstruct"))
        entries.append((multiarray.scalar, f"{module}.scalar"))
    try:
        entries += importlib.import_module("megatron.core.safe_globals").SAFE_GLOBALS
    except (ImportError, AttributeError):
        pass  # up to 0.14 it has no such list
    return tuple(dict.fromkeys(entries))


def drop_classes(state: Any, where: str) -> list[str]:
    """Take stand-ins for classes out of param groups, in place; refuse them anywhere else.

    Returns:
        The dotted paths that were removed.
    """
    removed = []
    for parent, key, item, path in walk([state]):
        if is_inert_class(item) and isinstance(parent, dict) and "param_groups" in path:
            removed.append(path)
            del parent[key]
        elif is_inert_class(item) or isinstance(item, Inert):
            raise CheckpointError(
                "the checkpoint names a class that weights_only does not allow; nothing was run",
                where=f"{where}: {path}",
                got=repr(item)[:200],
                expected="plain values and the classes that stock megatron-core saves",
                next_step="if you trust the checkpoint, allow this very class with"
                " torch.serialization.add_safe_globals",
            )
    return removed

"""Reads torch.save files that may be hostile, under weights_only, without importing what they name.

Three gates, each closed by default: the zip holds only stored (never deflated) entries that lie
inside the file; the pickle names only what stock megatron-core writes (checked before anything is
built); torch.load runs with weights_only=True and an allowlist that lasts for the call. Optimizer
classes (they leak into the common state, fault F9) and Megatron's enums become inert stand-ins.
"""

from __future__ import annotations

import argparse
import io
import os
import pathlib
import pickle
import pickletools
import signal
import threading
import types
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from vime_optim.errors import CheckpointError
from vime_optim.files.pickles import audit
from vime_optim.files.plain import no_archive, read_plain, unreadable
from vime_optim.files.stand_ins import (
    Inert,
    InertMeta,
    NamePickler,
    NumpyArray,
    NumpyDtype,
    inert_class,
    is_inert_class,
    numpy_scalar,
)
from vime_optim.state_dicts import PLAIN

DEFAULT_LIMIT_BYTES = 256 * 1024 * 1024
"""Largest common state or sharded object that is read; real ones hold a few megabytes at most."""

_NEVER_KEPT = frozenset({"builtins", "sys", "os", "posix", "nt", "subprocess", "importlib"})
"""Modules whose names are refused even as stand-ins; no optimizer class lives there."""

_KNOWN_PROJECTS = ("megatron.", "transformer_engine.")
"""Whose enums and configs (in `args`, say) are kept as inert instances where asked for."""

_NAMESPACES = (argparse.Namespace, types.SimpleNamespace)
_CONTAINERS = (dict, list, tuple, set, frozenset, Inert, *_NAMESPACES)
_LONGEST_PATH = 10_000
_DIRECTORY_LIMIT_BYTES = 4 * 1024 * 1024

OPTIMIZER_CLASSES = (
    "torch.optim.adam.Adam",
    "torch.optim.adamw.AdamW",
    "torch.optim.sgd.SGD",
    "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam",
    "transformer_engine.pytorch.optimizers.fused_sgd.FusedSGD",
    "apex.optimizers.fused_adam.FusedAdam",
    "apex.optimizers.fused_sgd.FusedSGD",
)
"""Classes that HybridDeviceOptimizer's defaults carry (megatron/core/optimizer/__init__.py)."""

_MEGATRON_CLASSES = (
    "megatron.core.enums.ModelType",
    "megatron.core.enums.Fp8Recipe",
    "megatron.core.enums.Fp4Recipe",
    "megatron.core.optimizer.optimizer_config.OptimizerConfig",
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState",
    "megatron.core.transformer.enums.ModelType",
    "megatron.core.transformer.enums.LayerType",
    "megatron.core.transformer.enums.AttnType",
    "megatron.core.transformer.enums.AttnMaskType",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.CudaGraphModule",
    "megatron.core.transformer.enums.CudaGraphScope",
    "megatron.core.transformer.enums.InferenceCudaGraphScope",
)

_TORCH_NAMES = frozenset(
    {
        "collections.OrderedDict",
        "collections.Counter",
        "_codecs.encode",
        "torch.Size",
        "torch.device",
        "torch._utils._rebuild_tensor",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",
        "torch._utils._rebuild_parameter",
        "torch.serialization._get_layout",
        "torch.storage.UntypedStorage",
    }
)
"""The few of weights_only's own names that megatron-core needs. Its others (torch.Tensor(n),
bytearray(n), rebuild functions that take sizes) allocate what the file asks for."""


def _never_call(*_args: Any) -> Any:
    raise pickle.UnpicklingError("this name is only a type tag")


def _new_generator(*_args: Any) -> Any:
    return inert_class("torch._C.Generator")(*_args)


def _reconstruct_array(_kind: Any, shape: Any, _code: Any) -> NumpyArray:
    if tuple(shape) != (0,):
        raise pickle.UnpicklingError("numpy array with a size before its data")
    return NumpyArray()


def _allowlist() -> list[tuple[Any, str]]:
    allowed: list[tuple[Any, str]] = [
        (argparse.Namespace, "argparse.Namespace"),
        (types.SimpleNamespace, "types.SimpleNamespace"),
        (io.BytesIO, "_io.BytesIO"),
        (signal.Signals, "signal.Signals"),
        (_never_call, "numpy.ndarray"),
        (NumpyDtype, "numpy.dtype"),
        (NumpyArray, "vime_optim.unreachable.NumpyArray"),
        (_new_generator, "torch._C.Generator"),
        (frozenset, "builtins.frozenset"),
    ]
    for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"):
        # A path of the other system cannot be made here, but its pure form can.
        local = pathlib.PurePosixPath if "Posix" in name else pathlib.PureWindowsPath
        real = pathlib.PosixPath if name == "PosixPath" and os.name == "posix" else local
        allowed.extend((real, f"{module}.{name}") for module in ("pathlib", "pathlib._local"))
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        allowed.append((_reconstruct_array, f"{module}._reconstruct"))
        allowed.append((numpy_scalar, f"{module}.scalar"))
    allowed.extend((inert_class(name), name) for name in OPTIMIZER_CLASSES + _MEGATRON_CLASSES)
    return allowed


_ALLOWED = _allowlist()
_ALLOWED_NAMES = (
    frozenset(name for _, name in _ALLOWED)
    | _TORCH_NAMES
    | {"builtins.set"}
    | {str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)}
    | {f"{kind.__module__}.{kind.__name__}" for kind in torch._storage_classes}
) - {"vime_optim.unreachable.NumpyArray"}


def pickle_globals(data: bytes) -> Iterator[str]:
    """Dotted name of everything that a protocol 2 pickle asks to import. Executes nothing.

    Raises:
        pickle.UnpicklingError: for opcodes that name things in another way, or a broken pickle.
    """
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "GLOBAL":
                module, name = str(argument).split(" ", 1)
                yield f"{module.replace('__builtin__', 'builtins')}.{name}"
            elif opcode.name in ("STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4", "PERSID"):
                raise pickle.UnpicklingError(f"opcode {opcode.name} is not used by torch.save")
    except (ValueError, IndexError, UnicodeDecodeError, OverflowError) as error:
        raise pickle.UnpicklingError(f"broken pickle: {error}") from error


def open_archive(file: IO[bytes]) -> zipfile.ZipFile:
    """The zip, after a look at the size of its directory: parsed entries take 20 times their bytes.

    Raises:
        ValueError: the directory is larger than any torch.save archive's.
        zipfile.BadZipFile: no zip at all.
    """
    end = zipfile._EndRecData(file)  # type: ignore[attr-defined]
    if end and end[zipfile._ECD_SIZE] > _DIRECTORY_LIMIT_BYTES:  # type: ignore[attr-defined]
        raise ValueError("the archive's directory is too large")
    return zipfile.ZipFile(file)


def read_data_pickle(archive: zipfile.ZipFile, size_bytes: int, limit_bytes: int) -> bytes:
    """Checks a torch.save archive's entries against the file and returns its pickle.

    Raises:
        ValueError: an entry is compressed, reaches out of the file, or the pickle is oversized.
    """
    pickles = [entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl")]
    for entry in archive.infolist():
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise ValueError(f"entry {entry.filename!r} is compressed; torch.save never does that")
        if entry.header_offset + entry.file_size > size_bytes:
            raise ValueError(f"entry {entry.filename!r} reaches past the end of the file")
    if len(pickles) != 1:
        raise ValueError("not a torch.save archive: no single data.pkl")
    if pickles[0].file_size > limit_bytes:
        raise ValueError(f"data.pkl of {pickles[0].file_size} bytes is over {limit_bytes}")
    return archive.read(pickles[0])


def audited_names(data: bytes | memoryview, limit_bytes: int) -> set[str]:
    """What a torch.save archive asks to import, once its pickle is known to be harmless to run.

    Raises:
        ValueError, pickle.UnpicklingError, zipfile.BadZipFile: it is not a whole archive, or its
            pickle would take more than a multiple of its length.
    """
    with open_archive(io.BytesIO(data)) as archive:
        content = read_data_pickle(archive, len(data), limit_bytes)
    audit(content)
    return set(pickle_globals(content))


def load_common(
    source: str | os.PathLike[str] | bytes,
    *,
    where: str | None = None,
    limit_bytes: int = DEFAULT_LIMIT_BYTES,
    keep_unknown_classes: bool = False,
) -> Any:
    """Loads a common state (common.pt) or the bytes of a sharded object, executing nothing.

    Optimizer classes come back as stand-in classes (see `is_inert_class`, `strip_classes`),
    Megatron's enums and configs as `Inert` instances; tensors are on the CPU.

    Args:
        source: the file, or its bytes.
        where: name for error messages; the path when left out.
        limit_bytes: largest file that is read.
        keep_unknown_classes: a *class* of an unknown name comes back as a stand-in too (a fork's
            optimizer in F9), and so does an instance of a class of Megatron's or Transformer
            Engine's; instances of others are refused all the same.

    Raises:
        CheckpointError: missing, truncated, not a torch.save archive, oversized, or holding a name
            outside the allowlist (the error names it).
    """
    label = where or ("bytes" if isinstance(source, bytes) else os.fspath(source))
    data = source if isinstance(source, bytes) else _read_file(Path(source), label, limit_bytes)
    try:
        names = audited_names(data, limit_bytes)
        unknown = names - _ALLOWED_NAMES
        never = {name for name in unknown if name.partition(".")[0] in _NEVER_KEPT}
        _refuse_unknown(never if keep_unknown_classes else unknown, label)
        with _only_our_globals([(inert_class(name), name) for name in sorted(unknown)]):
            loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        finished = _finish(loaded, {})
        made = {_inert_name(item) for _, _, item, _ in walk([finished])}
        foreign = {name for name in unknown & made if not name.startswith(_KNOWN_PROJECTS)}
        _refuse_unknown(foreign, label)
        return finished
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        raise no_archive(label, error) from error


_globals_lock = threading.Lock()


@contextmanager
def _only_our_globals(more: list[tuple[Any, str]]) -> Iterator[None]:
    """torch's allowlist holds ours alone for the call, and what it held before afterwards.

    Megatron registers its real classes under the same names; with both in torch's set, which of
    them a name means would depend on the order of a hash.
    """
    with _globals_lock:
        before = torch.serialization.get_safe_globals()
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(_ALLOWED + more)  # type: ignore[arg-type]
        try:
            yield
        finally:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(before)


def _read_file(path: Path, label: str, limit_bytes: int) -> bytes:
    try:
        return read_plain(path, limit_bytes)
    except FileNotFoundError as error:
        raise unreadable(label, error) from error


def _inert_name(item: object) -> str:
    kind: InertMeta | type = type(item)
    return kind.dotted_name if isinstance(kind, InertMeta) else ""


def _refuse_unknown(names: set[str], label: str) -> None:
    unknown = sorted(names)
    if unknown:
        raise CheckpointError(
            "This file asks to import names that no Megatron checkpoint needs; nothing was run.",
            where=label,
            got=", ".join(unknown[:8]) + (" ..." if len(unknown) > 8 else ""),
            expected="tensors, plain containers and the classes that stock megatron-core saves",
            next_step="Do not load this file elsewhere before you know who wrote it.",
        )


def _finish(value: Any, done: dict[int, Any]) -> Any:
    """Turns arrays on their way into real ones, in place in dicts, lists and namespaces."""
    if id(value) in done:
        return done[id(value)][1]
    if isinstance(value, NumpyArray):
        result: Any = value.value
    elif isinstance(value, NumpyDtype):
        result = value.dtype
    elif type(value) is tuple:
        result = tuple(_finish(item, done) for item in value)
    else:
        result = value
    done[id(value)] = (value, result)  # the value is kept too: its id must not be used again
    if isinstance(value, dict):
        for key in value:
            value[key] = _finish(value[key], done)
    elif isinstance(value, list):
        value[:] = [_finish(item, done) for item in value]
    elif isinstance(value, _NAMESPACES):
        for key in vars(value):
            setattr(value, key, _finish(getattr(value, key), done))
    return result


def strip_classes(value: Any, path: str = "") -> list[str]:
    """Removes optimizer classes from dicts, in place; returns the dotted paths removed.

    Works on stand-ins (a loaded state) and on real classes (a state about to be saved).
    """
    removed: list[str] = []
    for parent, key, item, dotted in walk(value, path):
        if isinstance(parent, dict) and (is_inert_class(item) or isinstance(item, type)):
            removed.append(dotted)
            del parent[key]
    return removed


def walk(value: Any, path: str = "") -> list[tuple[Any, Any, Any, str]]:
    """(parent, key, item, dotted path) of everything in nested containers and namespaces.

    Shared and cyclic containers are entered once. Numbers and texts in lists are passed over, as
    there may be millions.

    Raises:
        ValueError: nested deeper than anything that Megatron saves.
    """
    found: list[tuple[Any, Any, Any, str]] = []
    seen: set[int] = set()
    stack: list[tuple[Any, str]] = [(value, path)] if isinstance(value, _CONTAINERS) else []
    while stack:
        parent, prefix = stack.pop()
        if id(parent) in seen:
            continue
        seen.add(id(parent))
        if len(prefix) > _LONGEST_PATH:
            raise ValueError(f"nested too deep, at {prefix[:100]}...")
        items: Iterable[tuple[Any, Any]]
        if isinstance(parent, dict):
            items = parent.items()
        elif isinstance(parent, _NAMESPACES):
            items = vars(parent).items()
        elif isinstance(parent, Inert):
            items = enumerate((*parent.args, parent.state))
        else:
            items = enumerate(parent)
        for key, item in items:
            if type(item) in PLAIN and not isinstance(parent, dict):
                continue
            dotted = f"{prefix}.{key}" if prefix else str(key)
            found.append((parent, key, item, dotted))
            if isinstance(item, _CONTAINERS):
                stack.append((item, dotted))
    return found


def save_common(state: Any, target: str | os.PathLike[str] | io.BytesIO) -> None:
    """torch.save of a state that `load_common` gave; stand-ins become the names they hold."""
    module = types.ModuleType("vime_optim_pickle")
    module.Pickler = NamePickler  # type: ignore[attr-defined]
    torch.save(state, target, pickle_module=module)

"""Finds megatron-core (wheel, source checkout or fork), Transformer Engine and Apex.

Nothing here imports any of them: a file is looked for and, for the version, read as text.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from vime_optim.errors import InstallError

OLDEST_MEGATRON = Version("0.15")


@dataclass(frozen=True)
class Megatron:
    """Where megatron-core is and what it says of itself."""

    root: Path
    """The folder that holds `megatron/`."""
    version: Version | None
    kind: str
    """'wheel' (it has distribution metadata beside it) or 'source'."""

    def __str__(self) -> str:
        return f"megatron-core {self.version or 'of unknown version'} ({self.kind})"


def find_megatron() -> Megatron | None:
    """The megatron-core that `import megatron.core` would take, or None."""
    try:
        spec = importlib.util.find_spec("megatron.core")
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None:
        return None
    if spec.origin is not None:
        core = Path(spec.origin).parent
    elif spec.submodule_search_locations:
        core = Path(next(iter(spec.submodule_search_locations)))
    else:
        return None
    root = core.parent.parent
    wheel = any(root.glob("megatron_core-*.dist-info"))
    return Megatron(root=root, version=_version_of(core), kind="wheel" if wheel else "source")


def _version_of(core: Path) -> Version | None:
    """Version from package_info.py of the very tree; a wheel's metadata may belong to another."""
    try:
        text = (core / "package_info.py").read_text(encoding="utf-8")
    except OSError:
        text = ""
    parts = [re.search(rf"^{name}\s*=\s*(\d+)", text, re.M) for name in ("MAJOR", "MINOR", "PATCH")]
    if all(parts):
        suffix = re.search(r"^PRE_RELEASE\s*=\s*['\"](\w+)['\"]", text, re.M)
        numbers = ".".join(part.group(1) for part in parts if part)
        try:
            return Version(numbers + (suffix.group(1) if suffix else ""))
        except InvalidVersion:
            return Version(numbers)
    try:
        return Version(importlib.metadata.version("megatron-core"))
    except (importlib.metadata.PackageNotFoundError, InvalidVersion):
        return None


def require_supported(megatron: Megatron) -> None:
    """Refuse a megatron-core that is too old.

    Raises:
        InstallError: its version is known and older than 0.15.
    """
    if megatron.version is not None and megatron.version.release < OLDEST_MEGATRON.release:
        raise InstallError(
            "this megatron-core is too old for vime_optim",
            where=str(megatron.root),
            got=str(megatron.version),
            expected=f">= {OLDEST_MEGATRON}",
            next_step="upgrade megatron-core; nothing was changed",
        )


def transformer_engine_version() -> str | None:
    """Version of an installed Transformer Engine, or None."""
    for name in ("transformer-engine", "transformer_engine", "transformer-engine-torch"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown" if _has_module("transformer_engine.pytorch") else None


def nvidia_apex() -> bool | None:
    """True: NVIDIA's Apex. False: the unrelated project of that name. None: neither."""
    if not _has_module("apex"):
        return None
    return _has_module("apex.optimizers.fused_adam")


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError, AttributeError):
        return False

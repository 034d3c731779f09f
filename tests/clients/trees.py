"""Finds Megatron-LM source trees with `megatron.training`, which no wheel has.

VIME_OPTIM_MEGATRON_TREES names a folder of trees. Without it the archives `megatron-lm-*.tar.xz` of
a folder `shared/clients` beside the checkout are unpacked below `.build/trees`. The C++ helpers of
Megatron's data loaders are built on first use.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / ".build" / "trees"
VARIABLE = "VIME_OPTIM_MEGATRON_TREES"
#: The trees that the cases are written for, by the name of their folder.
TREES = ("megatron-lm-0.16.1", "megatron-lm-0.19.1", "megatron-lm-main", "megatron-lm-slime")
HOW_TO_GET = (
    f"no Megatron-LM source tree {{name}}: clone NVIDIA/Megatron-LM (tag core_v0.16.1 or newer) to"
    f" a folder {{name}} and let {VARIABLE} name the folder that holds it"
)


class NoTree(LookupError):
    """There is no such tree; the text says where to get one."""


def find(name: str) -> Path:
    """The tree of that name, ready to train.

    Raises:
        NoTree: neither a folder nor an archive of that name.
        RuntimeError: its helpers cannot be built.
    """
    folder = os.environ.get(VARIABLE)
    tree = Path(folder).absolute() / name if folder else _unpacked(name)
    if not (tree / "pretrain_gpt.py").is_file():
        raise NoTree(HOW_TO_GET.format(name=name))
    _build_helpers(tree)
    return tree


def _unpacked(name: str) -> Path:
    target = BUILD / name
    if target.is_dir():
        return target.resolve()
    archive = _archive(name)
    if archive is None:
        raise NoTree(HOW_TO_GET.format(name=name))
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            _unpack(archive, target)
    return target


def _unpack(archive: Path, target: Path) -> None:
    """Beside the target, then moved into place, so that nobody sees half of it."""
    partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(partial, filter="data")
        found = [path.parent for path in partial.glob("**/pretrain_gpt.py")]
        if len(found) != 1:
            raise RuntimeError(f"{archive} holds {len(found)} Megatron-LM trees, expected one")
        found[0].rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _archive(name: str) -> Path | None:
    for parent in ROOT.parents:
        path = parent / "shared" / "clients" / f"{name}.tar.xz"
        if path.is_file():
            return path
    return None


def _build_helpers(tree: Path) -> None:
    folder = tree / "megatron" / "core" / "datasets"
    if list(folder.glob("helpers_cpp*.so")):
        return
    with (folder / ".build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if list(folder.glob("helpers_cpp*.so")):
            return
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["make", "-C", str(folder)],
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"Megatron-LM's helpers cannot be built:\n{done.stderr[-2000:]}")

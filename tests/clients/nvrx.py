"""The Python parts of nvidia-resiliency-ext, as pip finds it, in a folder of their own.

In the environment itself an older one would keep megatron-core 0.19 from being imported, and the
newest wheels are for Python 3.12; what Megatron uses of them for checkpoints is plain Python.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from clients.trees import ROOT

VERSION = "0.7.0"
FOLDER = ROOT / ".build" / f"nvrx-{VERSION}"
PLATFORMS = ("manylinux_2_39_x86_64", "manylinux_2_28_x86_64", "manylinux_2_27_x86_64")


def find() -> Path:
    """The folder to put on PYTHONPATH; fetched from the package index on first use.

    Raises:
        RuntimeError: pip does not find it.
    """
    if FOLDER.is_dir():
        return FOLDER.resolve()
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with (FOLDER.parent / f".{FOLDER.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not FOLDER.is_dir():
            _fetch()
    return FOLDER


def _fetch() -> None:
    with tempfile.TemporaryDirectory(dir=FOLDER.parent, prefix=".nvrx.") as folder:
        wheel = _download(Path(folder))
        partial = Path(folder) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(partial)
        shutil.move(partial, FOLDER)


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    command += [str(folder), "--disable-pip-version-check", "--only-binary=:all:"]
    command += ["--python-version", "3.12", "--implementation", "cp", "--abi", "cp312"]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    done = subprocess.run(
        [*command, f"nvidia-resiliency-ext=={VERSION}"], capture_output=True, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise RuntimeError(f"pip found no nvidia-resiliency-ext {VERSION}: {done.stderr[-500:]}")
    return wheels[0]

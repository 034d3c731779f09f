"""Finds a megatron-core to work with: a path, or a release that pip fetches.

`resolve("0.16.1")` downloads the wheel of that release once, unpacks it below the cache folder and
returns the folder to put on `sys.path`. The wheels are built for Python 3.12 and newer; unpacked,
their Python code runs on 3.10 and newer too, which is why they are not installed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from vime_optim.errors import VerifyError

#: The releases that vime_optim is tested with, oldest first.
RELEASES = ("0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2")

_RELEASE = re.compile(r"\d+(\.\d+)+([a-z]+\d+)?")


def user_cache() -> Path:
    """Where what can be made again belongs: `~/.cache/vime_optim`, or below XDG_CACHE_HOME."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vime_optim"


def cache_dir() -> Path:
    """Where fetched releases live: VIME_OPTIM_CACHE_DIR, or `~/.cache/vime_optim/megatron`."""
    return Path(os.environ.get("VIME_OPTIM_CACHE_DIR") or user_cache() / "megatron").absolute()


def resolve(spec: str | Path) -> Path:
    """The folder that holds `megatron/core`, for `sys.path`.

    Args:
        spec: a wheel file, an unpacked wheel, a Megatron-LM source checkout, or a release number.

    Raises:
        VerifyError: the path holds no megatron-core, or the release cannot be fetched.
    """
    path = Path(spec)
    if path.is_file():
        return _unpack(path, cache_dir() / path.name.removesuffix(".whl"))
    if path.is_dir():
        return _tree(path)
    if _RELEASE.fullmatch(str(spec)):
        return fetch(str(spec))
    raise VerifyError(
        "no megatron-core there",
        where=str(spec),
        got="neither a file, nor a folder, nor a release number",
        expected=f"a path, or a release such as {RELEASES[-1]}",
    )


def fetch(release: str) -> Path:
    """Download one release with pip, once, safely among concurrent processes."""
    target = cache_dir() / release
    if _holds_megatron(target):
        return target
    with _locked(target):
        if _holds_megatron(target):
            return target
        print(f"downloading megatron-core {release} to {target}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{release}.wheel.") as folder:
            return _unpack_into(_download(release, Path(folder)), target)


def _download(release: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--python-version", "3.12"]
    command += ["--dest", str(folder), f"megatron-core=={release}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = [line for line in done.stderr.strip().splitlines() if line]
        raise VerifyError(
            f"pip could not download megatron-core {release}",
            got="\n".join(lines[-3:]) or f"{len(wheels)} wheels, exit status {done.returncode}",
            expected=f"one of the releases on the package index, such as {RELEASES[-1]}",
            next_step="check the network and the release, or give a path instead",
        )
    return wheels[0]


def _unpack(wheel: Path, target: Path) -> Path:
    with _locked(target):
        return target if _holds_megatron(target) else _unpack_into(wheel, target)


def _unpack_into(wheel: Path, target: Path) -> Path:
    """Unpack beside the target, then move into place, so that nobody sees half of it."""
    partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=f"{target.name}.part."))
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(partial)
        if not _holds_megatron(partial):
            raise VerifyError("the wheel holds no megatron-core", where=str(wheel))
        if target.exists():
            shutil.rmtree(target)
        partial.chmod(0o755)
        partial.rename(target)
    except zipfile.BadZipFile as error:
        raise VerifyError("not a wheel", where=str(wheel), got=str(error)) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _tree(path: Path) -> Path:
    if _holds_megatron(path):
        return path.absolute()
    if path.name == "megatron" and _holds_megatron(path.parent):
        return path.parent.absolute()
    raise VerifyError(
        "no megatron-core in that folder",
        where=str(path),
        expected="a folder with megatron/core/__init__.py below it",
    )


def _holds_megatron(path: Path) -> bool:
    return (path / "megatron" / "core" / "__init__.py").is_file()


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

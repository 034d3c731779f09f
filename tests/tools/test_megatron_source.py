from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from vime_optim.errors import VerifyError
from vime_optim.tools import megatron_source
from vime_optim.tools.megatron_source import RELEASES, resolve


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VIME_OPTIM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _wheel(folder: Path, files: dict[str, str]) -> Path:
    path = folder / "megatron_core-9.9.9-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def _tree(folder: Path) -> Path:
    package = folder / "megatron" / "core"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    return folder


def test_releases_are_the_supported_ones() -> None:
    assert RELEASES == ("0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2")


def test_a_tree_or_its_megatron_folder(tmp_path: Path) -> None:
    tree = _tree(tmp_path / "checkout")

    assert resolve(tree) == tree
    assert resolve(str(tree / "megatron")) == tree


def test_a_wheel_is_unpacked_once(tmp_path: Path, cache: Path) -> None:
    wheel = _wheel(tmp_path, {"megatron/core/__init__.py": "x = 1"})
    first = resolve(wheel)

    assert (first / "megatron" / "core" / "__init__.py").read_text() == "x = 1"
    assert resolve(wheel) == first
    assert first.parent == cache


def test_processes_that_fetch_at_once_share_one_download(tmp_path: Path, cache: Path) -> None:
    """A stand-in for pip counts its calls; four processes ask for the same release."""
    wheel = _wheel(tmp_path, {"megatron/core/__init__.py": ""})
    script = (
        "import pathlib, shutil, sys, time\n"
        "from vime_optim.tools import megatron_source as source\n"
        "def download(release, folder):\n"
        "    with open(sys.argv[2], 'a') as log: log.write('x')\n"
        "    time.sleep(0.3)\n"
        "    return pathlib.Path(shutil.copy(sys.argv[1], folder))\n"
        "source._download = download\n"
        "print(source.fetch('9.9.9'))\n"
    )
    log = tmp_path / "downloads"
    command = [sys.executable, "-c", script, str(wheel), str(log)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = {process.communicate()[0].strip() for process in processes}

    assert outputs == {str(cache / "9.9.9")}
    assert log.read_text() == "x"
    left = {path.name for path in cache.iterdir()}
    assert left == {"9.9.9", ".9.9.9.lock"}


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        ("no such place", None, "no megatron-core there"),
        ("empty", {}, "no megatron-core in that folder"),
    ],
)
def test_paths_without_megatron(
    tmp_path: Path, name: str, files: dict[str, str] | None, message: str
) -> None:
    if files is not None:
        (tmp_path / name).mkdir()
    with pytest.raises(VerifyError, match=message):
        resolve(tmp_path / name)


def test_wheels_that_are_none(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "torn.whl").write_text("not a zip")
    with pytest.raises(VerifyError, match="not a wheel"):
        resolve(tmp_path / "torn.whl")
    with pytest.raises(VerifyError, match="holds no megatron-core"):
        resolve(_wheel(tmp_path, {"numpy/__init__.py": ""}))
    assert not [path for path in cache.iterdir() if ".part." in path.name]


def test_pips_own_words_are_passed_on(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "", "ERROR: No matching distribution found")

    monkeypatch.setattr(megatron_source.subprocess, "run", fail)
    with pytest.raises(VerifyError, match="No matching distribution"):
        resolve("0.99.9")
    assert not (cache / "0.99.9").exists()

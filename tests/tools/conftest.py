"""The checkpoints of fixtures/, unpacked once a session, and copies to damage."""

from __future__ import annotations

import io
import lzma
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = sorted(path.name.removesuffix(".tar.xz") for path in FIXTURES.glob("*.tar.xz"))

Unpack = Callable[[str], Path]


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Unpack:
    """The directory of a fixture by name; do not change it."""
    root = tmp_path_factory.mktemp("stock")

    def unpack(name: str) -> Path:
        folder = root / name / "iter_0000003"
        if not folder.exists():
            data = lzma.decompress((FIXTURES / f"{name}.tar.xz").read_bytes())
            folder.mkdir(parents=True)
            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                for member in archive.getmembers():
                    file = archive.extractfile(member)
                    assert file is not None
                    (folder / Path(member.name).name).write_bytes(file.read())
        return folder

    return unpack


@pytest.fixture
def copy_of(stock: Unpack, tmp_path: Path) -> Unpack:
    """A copy of a fixture that a test may damage."""

    def make(name: str) -> Path:
        return Path(shutil.copytree(stock(name), tmp_path / "copy"))

    return make

"""A skip says its kind, is counted, and is a failure where its kind is required."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import CI_ONLY
from tests.skips import KINDS, fault_of, kind_of, required

ROOT = Path(__file__).resolve().parents[2]

FILES = {
    "conftest.py": "from tests.skips import *  # noqa: F403\n",
    "gpu/test_a.py": """
import pytest
def test_by_folder(): pytest.skip("no CUDA device")
def test_by_name(): pytest.skip("apex: it is not built here")
""",
    "test_b.py": """
import pytest
@pytest.mark.skipif(True, reason="ray: the extra is not installed")
def test_marked(): pass
@pytest.mark.xfail(reason="known")
def test_expected(): raise ValueError
def test_passes(): pass
""",
    "test_c.py": """
import pytest
pytest.skip("clients: no source tree", allow_module_level=True)
""",
}


def run_pytest(folder: Path, **env: str) -> str:
    """What pytest prints about the toy files; its last lines hold the counts."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    clean.pop("VIME_OPTIM_REQUIRE", None)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", str(folder)],
        cwd=folder,
        env={**clean, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def test_skips_are_counted_by_kind(tmp_path: Path) -> None:
    text = run_pytest(tmp_path)
    assert "skipped, by kind: apex 1, clients 1, gpu 1, ray 1" in text
    assert "1 passed, 4 skipped, 1 xfailed" in text


def test_a_required_kind_may_not_be_skipped(tmp_path: Path) -> None:
    text = run_pytest(tmp_path, VIME_OPTIM_REQUIRE="gpu, ray")
    assert "1 failed, 1 passed, 2 skipped, 1 xfailed, 1 error" in text
    assert "VIME_OPTIM_REQUIRE asks for `ray` (the extra `ray`)" in text
    assert "no CUDA device" in text
    text = run_pytest(tmp_path, VIME_OPTIM_REQUIRE="clients")
    assert "asks for `clients`" in text
    assert "1 error" in text
    assert "by kind" not in run_pytest(tmp_path, VIME_OPTIM_REQUIRE="all")


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_can_be_required_alone(kind: str) -> None:
    for nodeid, reason in (("tests/a.py::b", f"{kind}: not here"), (f"{kind}/a.py::b", "not here")):
        assert f"asks for `{kind}`" in str(fault_of(nodeid, reason, required(kind)))
        assert fault_of(nodeid, reason, required(",".join(KINDS.keys() - {kind}))) is None


def test_a_word_that_is_no_kind_is_refused(tmp_path: Path) -> None:
    text = run_pytest(tmp_path, VIME_OPTIM_REQUIRE="gpus")
    assert "VIME_OPTIM_REQUIRE names gpus" in text
    assert "passed" not in text
    with pytest.raises(pytest.UsageError, match="names no-such"):
        required("ray,no-such")
    assert required("all") == KINDS.keys()
    assert required(" ray ,") == {"ray"}


def test_what_is_left_to_ci_is_there() -> None:
    """A test that was renamed would quietly come back into `make test`."""
    for start in CI_ONLY:
        path, _, name = start.partition("::")
        assert (ROOT / path).exists(), start
        assert not name or f"def {name}(" in (ROOT / path).read_text(), start


def test_a_skip_of_no_kind_is_a_failure() -> None:
    assert "no known kind" in str(fault_of("tests/test_x.py::test_y", "not today", frozenset()))
    assert fault_of("tests/test_x.py::test_y", "ray: not here", frozenset()) is None
    assert kind_of("tests/clients/test_x.py::test_y", "Skipped: no tree") == "clients"
    assert kind_of("tests/gpu/test_x.py::test_y", "Skipped: apex: not built") == "apex"

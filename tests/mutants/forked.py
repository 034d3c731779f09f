"""Runs pytest on a copy of the tree in a forked process, which has torch already."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 1200
_PRELOADED = ("torch", "torch.distributed.checkpoint", "numpy", "pytest", "hypothesis", "yaml")
_OPTIONS = ("-q", "--tb=short", "--hypothesis-seed=0", "-p", "no:cacheprovider", "-n", "0")


@dataclass(frozen=True)
class Ran:
    """How pytest ended (None: it was stopped at the limit) and what it printed."""

    status: int | None
    output: str


def preload() -> None:
    """Import what every test needs, but nothing of the package, which is another one each time."""
    for name in _PRELOADED:
        importlib.import_module(name)
    loaded = [name for name in sys.modules if name.partition(".")[0] == "vime_optim"]
    assert not loaded, f"{loaded} would be tested instead of the copy"


def run_tests(
    tree: Path, tests: Sequence[str], limit_s: float = LIMIT_S, *, to_the_end: bool = False
) -> Ran:
    """Run tests (ids as pytest takes them, from the tree's root) with the tree's own package."""
    options = list(_OPTIONS) if to_the_end else [*_OPTIONS, "-x"]
    with tempfile.TemporaryFile("w+") as output:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            status = 70
            try:
                status = _in_child(tree, [*options, *tests], output.fileno())
            finally:
                os._exit(status)
        status = _wait(child, limit_s)
        output.seek(0)
        return Ran(status, output.read())


def _wait(child: int, limit_s: float) -> int | None:
    """Its exit status; None where it had to be stopped. Ranks that it left behind end too."""
    deadline = time.monotonic() + limit_s
    status: int | None = None
    while time.monotonic() < deadline:
        done, code = os.waitpid(child, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(code)
            break
        time.sleep(0.02)
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        pass
    if status is None:
        os.waitpid(child, 0)
    return status


def _in_child(tree: Path, arguments: Sequence[str], output: int) -> int:
    os.setpgid(0, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(tree)
    for name in [n for n in sys.modules if n.partition(".")[0] in ("tests", "vime_optim")]:
        del sys.modules[name]
    sys.path[:] = [str(tree), *(p for p in sys.path if p not in ("", os.environ.get("PWD")))]
    os.environ["PYTHONPATH"] = str(tree)
    os.environ["VIME_OPTIM_REQUIRE"] = "all"  # a test that is skipped notices nothing
    # Files change within a second and keep their size: a compiled one may be of another change.
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    package = importlib.import_module("vime_optim")
    assert Path(str(package.__file__)).is_relative_to(tree), package.__file__
    import pytest

    return int(pytest.main([f"--rootdir={tree}", *arguments]))

"""Fixtures for the whole suite: megatron-core releases and one fork server for each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cases import Case, tree_of
from tests.phases import Phases
from tests.skips import (  # noqa: F401
    pytest_configure,
    pytest_make_collect_report,
    pytest_runtest_makereport,
    pytest_terminal_summary,
)
from vime_optim.tools.megatron_source import RELEASES, fetch
from vime_optim.verify.launch import ForkLauncher
from vime_optim.verify.runner import Outcome, run_case

#: Template processes kept alive at once; each holds an imported torch and megatron-core.
MAX_LAUNCHERS = 2


@pytest.fixture(scope="session")
def megatron_tree() -> Callable[[str], Path]:
    """The unpacked wheel of a release, fetched with pip on first use."""
    return fetch


class LauncherPool:
    """Fork servers by release, the least recently used one closed when there are too many."""

    def __init__(self) -> None:
        self._open: dict[str, ForkLauncher] = {}

    def get(self, release: str) -> ForkLauncher:
        launcher = self._open.pop(release, None) or ForkLauncher(_megatron_of(release))
        self._open[release] = launcher
        while len(self._open) > MAX_LAUNCHERS:
            self._open.pop(next(iter(self._open))).close()
        return launcher

    def close(self) -> None:
        for launcher in self._open.values():
            launcher.close()


def _megatron_of(release: str) -> Path:
    """A release, or a source tree, without which the test is skipped."""
    from tests.clients import trees

    try:
        return tree_of(release)
    except trees.NoTree as missing:
        pytest.skip(f"clients: {missing}")


@pytest.fixture(scope="session")
def launchers() -> Iterator[LauncherPool]:
    pool = LauncherPool()
    yield pool
    pool.close()


@pytest.fixture
def phases(launchers: LauncherPool, tmp_path: Path) -> Phases:
    return Phases(launchers, tmp_path)


@pytest.fixture
def run(launchers: LauncherPool, tmp_path: Path) -> Callable[[Case], Outcome]:
    """Run a case (or its compact spelling) on its release's launcher."""

    def run_on_launcher(case: Case | str) -> Outcome:
        case = Case.parse(case) if isinstance(case, str) else case
        folder = tmp_path / re.sub(r"[^\w.=-]+", "_", case.name)[:100]
        return run_case(launchers.get(case.megatron), case, folder)

    return run_on_launcher


def release_of(nodeid: str) -> int:
    """Index of the release that a test names, or -1."""
    name = nodeid.partition("::")[2]
    return next((index for index, release in enumerate(RELEASES) if release in name), -1)


def clients_tree_of(nodeid: str) -> str:
    """The Megatron-LM tree that a test of tests/clients names; they share its template."""
    found = re.search(r"megatron-lm-([\w.]+)", nodeid)
    return f"clients {found.group(1)}" if found else nodeid.partition("::")[0]


#: What `make test` leaves to CI (`make test-ci`), by the start of the test's id: whole training
#: loops and frameworks, Ray, package builds, trees with our patches, what stock does wrong, and
#: one rank's failures; each of it takes minutes.
CI_ONLY = (
    "tests/clients/",
    "tests/project/test_package.py",
    "tests/test_patches.py::test_install_on_top_resumes_exactly",
    "tests/test_patches.py::test_resumes_exactly_without_install",
    "tests/fixes/test_foreign.py",
    "tests/fixes/test_reported_faults.py",
    "tests/verify/test_ray.py",
    "tests/verify/test_stock.py",
    "tests/fixes/test_writer_commit.py",
    "tests/fixes/test_writer_async.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep tests of one release together, so that each template starts once; mark those of CI."""
    for item in items:
        if item.nodeid.startswith(CI_ONLY):
            item.add_marker("ci")
    items.sort(key=lambda item: release_of(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Parallel runs: tests of one release go to one process, and so do the others of a module.

    What xdist has for this, marks of groups, does nothing under pytest 9.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByRelease(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            if "/clients/" in nodeid:
                return clients_tree_of(nodeid)
            index = release_of(nodeid)
            return nodeid.partition("::")[0] if index < 0 else RELEASES[index]

    return ByRelease(config, log)

"""Real devices, or a rehearsal of these tests on the simulated one (VIME_OPTIM_GPU_REHEARSE=1)."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vime_optim.megatron_source import resolve
from vime_optim.verify.case import Case
from vime_optim.verify.runner import Outcome, run_case

sys.path.insert(0, str(Path(__file__).parent))
from resident import REHEARSE, ResidentLauncher, missing_devices


class ResidentPool:
    """One launcher at a time, since every rank holds a GPU context."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._release = ""
        self._launcher: ResidentLauncher | None = None

    def get(self, release: str) -> ResidentLauncher:
        if self._launcher is None or release != self._release:
            self.close()
            device = "cpu" if REHEARSE else "cuda"
            self._launcher = ResidentLauncher(resolve(release), device, self._folder / release)
            self._release = release
        return self._launcher

    def close(self) -> None:
        if self._launcher is not None:
            self._launcher.close()
        self._launcher = None


@pytest.fixture(scope="session")
def residents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ResidentPool]:
    reason = missing_devices(2)
    if reason:
        pytest.skip(reason)
    pool = ResidentPool(tmp_path_factory.mktemp("residents"))
    yield pool
    pool.close()


@pytest.fixture
def run(residents: ResidentPool, tmp_path: Path) -> Callable[[Case], Outcome]:
    """Run a case on ranks that stay alive; model and optimizer are new in every phase."""

    def run_on_resident(case: Case) -> Outcome:
        folder = tmp_path / re.sub(r"[^\w.=-]+", "_", case.name)[:100]
        return run_case(residents.get(case.megatron), case, folder, timeout_s=90.0)

    return run_on_resident

"""Real devices, or a rehearsal of these tests on the simulated one (VIME_OPTIM_GPU_REHEARSE=1)."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cases import Case
from vime_optim.verify.runner import Outcome, run_case

sys.path.insert(0, str(Path(__file__).parent))
from resident import ResidentPool, missing_devices


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


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Cases of async saves last, so that a run that is cut short has seen every optimizer.

    After the suite's own order by release: each release then starts twice.
    """
    items.sort(key=_is_async)


def _is_async(item: pytest.Item) -> bool:
    case = getattr(item, "callspec", None) and item.callspec.params.get("case")  # type: ignore[attr-defined]
    return isinstance(case, Case) and case.async_mode != "off"

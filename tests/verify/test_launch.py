from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from vime_optim.errors import VerifyError
from vime_optim.verify.launch import (
    ForkLauncher,
    ProcessLauncher,
    RankFailure,
    TemplateError,
    open_launcher,
)

RELEASE = "0.16.1"
TARGETS = "tests.verify.targets:"


@pytest.fixture
def launcher(launchers: Any) -> ForkLauncher:
    return launchers.get(RELEASE)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_returns_results_by_rank_and_keeps_logs(launcher: ForkLauncher, tmp_path: Path) -> None:
    results = launcher.run(
        TARGETS + "sum_of_ranks", world_size=3, payload={"offset": 10}, out=tmp_path
    )

    assert results == [{"rank": r, "total": 33, "world_size": 3} for r in range(3)]
    assert all("hello" in (tmp_path / f"rank{r}.log").read_text() for r in range(3))


def test_a_relative_folder_of_any_name(
    launcher: ForkLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    results = launcher.run(
        TARGETS + "sum_of_ranks",
        world_size=2,
        payload={"offset": 0},
        out=Path(".a folder #1/100%"),
    )

    assert [result["total"] for result in results] == [1, 1]


def _has_result(answer: Path) -> bool:
    return answer.exists() and "result" in json.loads(answer.read_text())


def test_an_exception_is_reported_with_rank_and_traceback(
    launcher: ForkLauncher, tmp_path: Path
) -> None:
    with pytest.raises(RankFailure) as failure:
        launcher.run(TARGETS + "raise_on_one", world_size=3, payload={"rank": 1}, out=tmp_path)

    assert failure.value.rank == 1
    assert failure.value.error_type == "LookupError"
    assert failure.value.message == "this rank has lost its way"
    assert "raise_on_one" in failure.value.traceback
    # The others waited at a barrier that never opens: they were ended, or lost their peer.
    assert not _has_result(tmp_path / "rank0.json")


def test_a_killed_rank_ends_the_others(launcher: ForkLauncher, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="signal 9") as failure:
        launcher.run(TARGETS + "die_on_one", world_size=2, payload={"rank": 1}, out=tmp_path)

    assert failure.value.rank == 1
    assert failure.value.error_type == "ProcessDied"
    assert not _has_result(tmp_path / "rank0.json"), "the other was waited for to its end"


def test_a_timeout_ends_ranks_and_their_children(launcher: ForkLauncher, tmp_path: Path) -> None:
    for limit_s in (5, 30, 180):  # a busy machine may need longer to start them all
        pids = tmp_path / f"pids{limit_s}"
        pids.mkdir()
        with pytest.raises(VerifyError, match=f"longer than {limit_s} s"):
            launcher.run(
                TARGETS + "hang_with_child",
                world_size=2,
                payload={"pids": str(pids)},
                out=tmp_path / f"out{limit_s}",
                timeout_s=limit_s,
            )
        seen = [int(path.name) for path in pids.iterdir()]
        if len(seen) == 4:
            break
    assert len(seen) == 4
    deadline = time.monotonic() + 60
    while any(map(_alive, seen)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_alive, seen))


def test_every_launch_starts_from_the_untouched_template(
    launcher: ForkLauncher, tmp_path: Path
) -> None:
    target = TARGETS + "leave_a_mark"
    first = launcher.run(target, world_size=1, payload={}, out=tmp_path / "a")
    second = launcher.run(target, world_size=1, payload={}, out=tmp_path / "b")

    assert (first, second) == ([False], [False])


def test_process_launcher_runs_one_process_a_rank(megatron_tree: Any, tmp_path: Path) -> None:
    with ProcessLauncher(megatron_tree(RELEASE), "cpu") as launcher:
        results = launcher.run(
            TARGETS + "sum_of_ranks", world_size=2, payload={"offset": 0}, out=tmp_path / "a"
        )
        assert [result["total"] for result in results] == [1, 1]
        with pytest.raises(RankFailure, match="lost its way"):
            launcher.run(
                TARGETS + "raise_on_one", world_size=2, payload={"rank": 0}, out=tmp_path / "b"
            )


def test_a_tree_that_cannot_be_imported(tmp_path: Path) -> None:
    package = tmp_path / "megatron" / "core"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('a broken tree')")

    with open_launcher(tmp_path) as launcher, pytest.raises(TemplateError, match="a broken tree"):
        launcher.run(TARGETS + "leave_a_mark", world_size=1, payload={}, out=tmp_path / "out")


def test_closing_ends_the_template(megatron_tree: Any, tmp_path: Path) -> None:
    launcher = ForkLauncher(megatron_tree(RELEASE))
    pid = launcher._process.pid
    launcher.close()

    assert not _alive(pid)
    assert not os.path.exists(launcher.log)

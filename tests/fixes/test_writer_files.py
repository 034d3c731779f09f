"""A few points of each campaign; `python -m tests.writer.points --help` runs hundreds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import LauncherPool
from tests.writer.points import BAD, points


def bad(found: dict[str, dict[str, int]]) -> list[str]:
    return [
        outcome for kind in found.values() for outcome in kind if any(w in outcome for w in BAD)
    ]


def test_kills_pauses_and_two_jobs() -> None:
    found = points({"kill": 3, "pause": 2, "two_jobs": 2}, "0.16.1")
    assert not bad(found), found
    assert {kind: sum(counts.values()) for kind, counts in found.items()} == {
        "kill": 3,
        "pause": 2,
        "two_jobs": 2,
    }


@pytest.mark.matrix
@pytest.mark.parametrize("release", ["0.16.1", "0.19.2"])
def test_disks_that_fail_and_files_that_go(release: str) -> None:
    """Needs a C compiler, for the library that is preloaded."""
    found = points({"disk": 20, "removed": 10, "kill": 20}, release, limit_s=900)
    assert not bad(found), found
    assert any("raised, refused" in outcome for outcome in found["disk"]), found


@pytest.mark.parametrize("release", ["0.16.1", pytest.param("0.19.2", marks=pytest.mark.matrix)])
def test_a_method_that_somebody_put_in_place_writes(
    release: str, launchers: LauncherPool, tmp_path: Path
) -> None:
    launcher = launchers.get(release)
    payload = {"directory": str(tmp_path / "saved"), "saves": [1, 2]}
    for answer in launcher.run(
        "tests.fixes.own_writer_job:saves", world_size=2, payload=payload, out=tmp_path / "save"
    ):
        failed, *others = answer["errors"]
        assert "this store is full" in failed
        assert others == ["", ""]
        noted = answer["noted"]
        assert noted[1] > 0
        assert noted[::2] == [0, 0]
    for answer in launcher.run(
        "tests.planning.plan_job:loads", world_size=2, payload=payload, out=tmp_path / "load"
    ):
        assert answer["equal"] == {"1": True, "2": True}

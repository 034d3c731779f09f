"""HybridDeviceOptimizer's own load_state_dict(), for callers without DistributedOptimizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import LauncherPool


@pytest.mark.parametrize(
    ("dtype", "fraction"), [("bfloat16", 0.5), ("bfloat16", 1.0), ("float32", 0.5)]
)
def test_masters_of_both_halves_come_back(
    dtype: str, fraction: float, launchers: LauncherPool, tmp_path: Path
) -> None:
    """A load builds the parts anew, with masters made of the parameters, rounded as they are."""
    (answer,) = launchers.get("0.16.1").run(
        "tests.fixes.hybrid_job:reload",
        world_size=1,
        payload={"dtype": dtype, "fraction": fraction},
        out=tmp_path / "out",
    )
    assert set(answer["halves"]) == ({"host", "device"} if fraction < 1 else {"host"})
    saved = answer["saved"]
    if dtype == "bfloat16":
        # Otherwise a master that is made anew would do, and the test would show nothing.
        for master, param in zip(saved["masters"], saved["params"], strict=True):
            assert master != param
    assert answer["loaded"] == saved
    assert answer["resumed"] == answer["went_on"]

"""State of HybridDeviceOptimizer is made without random numbers (F15)."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import LauncherPool


def test_state_is_made_without_random_numbers(launchers: LauncherPool, tmp_path: Path) -> None:
    """F15: Megatron's own dummy_step() steps on random gradients."""
    (answer,) = launchers.get("0.16.1").run(
        "tests.fixes.hybrid_job:fresh_state", world_size=1, payload={}, out=tmp_path / "out"
    )
    assert answer == {
        "rng_untouched": True,
        "params_untouched": True,
        "moments": 8,
        "non_zero": 0,
    }

"""Checks that only a real device can make: order of copies, pinning, growth, synchronisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import resident as gpu

from tests.cases import Case
from vime_optim.verify.compare import compare, load_state

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(gpu.REHEARSE, reason="streams and pinned memory need a real device"),
]
RELEASES = ("0.16.1", "0.19.2")


def _launch(residents: gpu.ResidentPool, folder: Path, target: str, case: str, **more: Any) -> Any:
    parsed = Case.parse(case)
    payload = {
        "case": parsed.to_dict(),
        "directory": str(folder / "checkpoint"),
        "captures": str(folder / "captures"),
        **more,
    }
    launcher = residents.get(parsed.megatron)
    return launcher.run(
        f"checks_job:{target}", world_size=2, payload=payload, out=folder / "answer", timeout_s=150
    )


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("backend", ["hybrid,pao,f=0.5", "hybrid,nopao,f=0.5", "fused,pao"])
def test_twenty_rounds_hold_no_more_memory(
    release: str, backend: str, residents: gpu.ResidentPool, tmp_path: Path
) -> None:
    for answer in _launch(residents, tmp_path, "rounds", f"{release},{backend},dp=2", rounds=20):
        before, first, *later = answer["rounds"]
        print(f"{release} {backend}: {before}, after a round {first}")
        assert all(seen == first for seen in later), answer["rounds"]
        assert {**before, "device_bytes": 0} == {**first, "device_bytes": 0}
        if "nopao" in backend:  # Megatron pins host copies of float32 parameters, no 16-bit ones
            assert first["pinned"] > 0


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("backend", ["hybrid,pao,f=0.5", "fused,pao"])
def test_a_step_waits_no_more_than_stock(
    release: str, backend: str, residents: gpu.ResidentPool, tmp_path: Path
) -> None:
    case = f"{release},{backend},dp=2"
    stock = _launch(residents, tmp_path / "stock", "waits_of_a_step", f"{case},stock")
    ours = _launch(residents, tmp_path / "ours", "waits_of_a_step", case)
    print(f"{case}: stock {stock}, with vime_optim {ours}")
    assert ours == stock


@pytest.mark.parametrize("release", RELEASES)
def test_copied_parameters_are_there_before_the_next_pass(
    release: str, residents: gpu.ResidentPool, tmp_path: Path
) -> None:
    """F17. Stock is measured beside, and printed: 0.16.1 and later wait for the right stream."""
    case = f"{release},hybrid,pao,f=1,dp=2"
    stock = _launch(residents, tmp_path / "stock", "copy_back", f"{case},stock", rounds=10)
    ours = _launch(residents, tmp_path / "ours", "copy_back", case, rounds=10)
    print(f"{case}: stale reads on stock {[rank['stale_reads'] for rank in stock]}")
    assert [rank["stale_reads"] for rank in ours] == [0, 0]


@pytest.mark.parametrize("release", RELEASES)
def test_the_device_steps_on_gradients_that_are_there(
    release: str, residents: gpu.ResidentPool, tmp_path: Path
) -> None:
    """F28: 16-bit gradients are cast on a copy stream, which may be late."""
    case = f"{release},hybrid,pao,f=0.5,dp=2,steps=3,more=0"
    captures = tmp_path / "captures"
    for name, words, hold_up in (
        ("prompt", case, False),
        ("late", case, True),
        ("stock_prompt", f"{case},stock", False),
        ("stock_late", f"{case},stock", True),
    ):
        _launch(residents, tmp_path, "cast_gradients", words, hold_up=hold_up, name=name)
    stock = compare(load_state(captures / "stock_prompt"), load_state(captures / "stock_late"))
    print(f"{case}: {len(stock)} tensors differ on stock when the casts are late")
    assert compare(load_state(captures / "prompt"), load_state(captures / "late")) == []

"""F28: every parameter is trained under CPU offload with PAO, float32 ones on the device too."""

from __future__ import annotations

from pathlib import Path

from tests.cases import Case
from tests.conftest import LauncherPool
from vime_optim.verify.compare import compare, load_state


def test_float32_parameters_on_the_device_are_trained_and_saved_twice(
    launchers: LauncherPool, tmp_path: Path
) -> None:
    """Saves before the first step, trains, saves again: the second save needs one step counter."""
    case = Case.parse("0.16.1,hybrid,pao,f=0.5,torchonly,dp=2,fp32norm")
    payload = {
        "case": case.to_dict(),
        "directory": str(tmp_path / "checkpoint"),
        "captures": str(tmp_path / "captures"),
        "step": 0,
    }
    for phase in ("save", "save_again", "resume"):
        launchers.get(case.megatron).run(
            f"tests.fixes.fresh_job:{phase}", world_size=2, payload=payload, out=tmp_path / phase
        )
    saved = load_state(tmp_path / "captures" / "saved_again")
    moments = {key: value for key, value in saved.tensors.items() if key[0] == "exp_avg_sq"}
    assert moments
    assert [name for (_, name), value in moments.items() if not bool(value.any())] == []
    resumed = load_state(tmp_path / "captures" / "resumed")
    assert compare(load_state(tmp_path / "captures" / "after_save"), resumed) == []

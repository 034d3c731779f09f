"""F28: every parameter is trained under CPU offload with PAO, float32 ones on the device too."""

from __future__ import annotations

from tests.cases import Case
from tests.phases import Phases


def test_float32_parameters_on_the_device_are_trained_and_saved_twice(phases: Phases) -> None:
    """Saves before the first step, trains, saves again: the second save needs one step counter."""
    case = Case.parse("0.16.1,hybrid,pao,f=0.5,torchonly,dp=2,fp32norm")
    for phase in ("save", "save_again", "resume"):
        phases.run(f"tests.fixes.fresh_job:{phase}", case)
    saved = phases.state("saved_again")
    moments = {key: value for key, value in saved.tensors.items() if key[0] == "exp_avg_sq"}
    assert moments
    assert [name for (_, name), value in moments.items() if not bool(value.any())] == []
    assert phases.differences("after_save", "resumed") == []

"""The resume matrix on real devices, with Transformer Engine's FusedAdam: every bit is the same."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import resident as gpu

from vime_optim.verify.case import Case
from vime_optim.verify.runner import Outcome, run_case

pytestmark = pytest.mark.gpu
RELEASES = ("0.16.1", "0.19.2")
BACKENDS = (
    "hybrid,pao,f=1",
    "hybrid,pao,f=0.5",
    "hybrid,pao,f=0.25",
    "hybrid,nopao,f=1",
    "hybrid,nopao,f=0.5",
    "fused,pao",
    "fused,pao,norem",
    "fused,pao,m=bf16,v=bf16",
    "fused,pao,m=fp16,v=fp16",
    "fused,pao,m=fp8,v=fp8",
    "fused,nopao",
    "torch",
)
FORMATS = ("fully_reshardable", "dp_reshardable")
ASYNC = (
    "hybrid,pao,f=1,async=forked",
    "hybrid,pao,f=0.5,async=persistent",
    "fused,pao,async=persistent",
)


def _cases() -> list[Case]:
    texts = [f"{backend},{sharding}" for backend in BACKENDS for sharding in FORMATS]
    texts += [f"{text},fully_reshardable" for text in ASYNC]
    return [Case.parse(f"{release},{text},dp=2") for release in RELEASES for text in texts]


@pytest.mark.parametrize("case", _cases(), ids=lambda case: case.name)
def test_resumes_exactly(case: Case, run: Callable[[Case], Outcome]) -> None:
    outcome = run(case)

    assert outcome.error is None, f"{outcome.summary()}\n{outcome.traceback}"
    assert outcome.exact, "\n".join([outcome.summary(), *outcome.differences[:12]])
    assert outcome.sound, outcome.summary()


class _RunAs:
    """A launcher whose ranks run torch's AdamW in one of its implementations."""

    def __init__(self, launcher: gpu.ResidentLauncher, implementation: str) -> None:
        self._launcher = launcher
        self._implementation = implementation

    def run(self, target: str, *, payload: dict[str, Any], **kwargs: Any) -> list[Any]:
        payload = {**payload, "adam": self._implementation}
        return self._launcher.run(target, payload=payload, **kwargs)


@pytest.mark.parametrize("implementation", ["scalar", "foreach", "fused"])
@pytest.mark.parametrize("sharding", FORMATS)
@pytest.mark.parametrize("release", RELEASES)
def test_native_adam_resumes_exactly(
    release: str, sharding: str, implementation: str, residents: gpu.ResidentPool, tmp_path: Path
) -> None:
    case = Case.parse(f"{release},torch,{sharding},dp=2")
    launcher = _RunAs(residents.get(release), implementation)

    outcome = run_case(launcher, case, tmp_path, timeout_s=90.0)

    assert outcome.error is None, f"{outcome.summary()}\n{outcome.traceback}"
    assert outcome.exact, "\n".join([outcome.summary(), *outcome.differences[:12]])
    assert outcome.sound, outcome.summary()


@pytest.mark.parametrize("release", RELEASES)
def test_fresh_processes(release: str, tmp_path: Path) -> None:
    """Saved, continued and resumed in three launches of new processes."""
    reason = gpu.missing_devices(2)
    if reason:
        pytest.skip(reason)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "vime_optim.cli", "verify", "--megatron", release),
            *("--device", "cpu" if gpu.REHEARSE else "cuda", "--offload-fraction", "0.5"),
            *("--dir", str(tmp_path / "verify")),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TORCHDYNAMO_DISABLE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

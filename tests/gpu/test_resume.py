"""The resume matrix on real devices: every bit is the same.

Transformer Engine's FusedAdam, NVIDIA Apex's where it is installed, and torch's AdamW. The product
of optimizers, formats, ways to save and releases takes longer than a run may last: cases that save
in the foreground come first, in both releases, then the others (see conftest.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import resident as gpu

from tests.cases import Case
from vime_optim.verify.runner import Outcome, run_case

pytestmark = pytest.mark.gpu
RELEASES = ("0.16.1", "0.19.2")
FORMATS = ("fully_reshardable", "dp_reshardable")
MODES = ("", ",async=forked", ",async=persistent")
FRACTIONS = ("1", "0.5", "0.25")
MOMENTS = ("", ",m=bf16,v=bf16", ",m=fp16,v=fp16", ",m=fp8,v=fp8")
BACKENDS = (
    *(f"hybrid,{pao},f={fraction}" for pao in ("pao", "nopao") for fraction in FRACTIONS),
    *(f"fused,pao{moments}{kept}" for kept in ("", ",norem") for moments in MOMENTS),
    "fused,nopao",
    "fused,apex,nopao",
    *(f"hybrid,apex,{pao},f={f}" for pao in ("pao", "nopao") for f in FRACTIONS[1:]),
)
#: Megatron has an option for these since 0.17.
NEWER_BACKENDS = ("fused,apex,nopao,capturable",)
#: Where there is Apex and no Transformer Engine, these refuse PAO with CPU offload themselves: they
#: compare the version of Transformer Engine, which is None.
NO_PAO_WITHOUT_TE = ("0.16.1",)
#: Implementations of torch's AdamW.
NATIVE = ("scalar", "foreach", "fused")


def _cases() -> list[Any]:
    """(case, implementation of torch's AdamW or None), every optimizer before the next variant."""
    found = []
    for mode, release, sharding in product(MODES, RELEASES, FORMATS):
        newer = NEWER_BACKENDS if release == RELEASES[-1] else ()
        torch_only = [("torch", implementation) for implementation in NATIVE]
        for words, native in [(words, None) for words in (*BACKENDS, *newer)] + torch_only:
            if release in NO_PAO_WITHOUT_TE and words.startswith("hybrid,apex,pao"):
                continue
            case = Case.parse(f"{release},{words},{sharding},dp=2{mode}")
            name = case.name if native is None else f"{case.name},{native}"
            found.append(pytest.param(case, native, id=name))
    return found


class _RunAs:
    """A launcher whose ranks run torch's AdamW in one of its implementations."""

    def __init__(self, launcher: gpu.ResidentLauncher, implementation: str) -> None:
        self._launcher = launcher
        self._implementation = implementation

    def run(self, target: str, *, payload: dict[str, Any], **kwargs: Any) -> list[Any]:
        payload = {**payload, "adam": self._implementation}
        return self._launcher.run(target, payload=payload, **kwargs)


@pytest.mark.parametrize(("case", "native"), _cases())
def test_resumes_exactly(
    case: Case,
    native: str | None,
    run: Callable[[Case], Outcome],
    residents: gpu.ResidentPool,
    tmp_path: Path,
) -> None:
    reason = gpu.missing_fused_adam(case.backend)
    if reason:
        pytest.skip(reason)

    if native is None:
        outcome = run(case)
    else:
        launcher = _RunAs(residents.get(case.megatron), native)
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

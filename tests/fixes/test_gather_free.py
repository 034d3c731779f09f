"""What is saved without gathering is a file of Megatron (F10, F11)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases import Case
from tests.conftest import LauncherPool
from tests.fixes.test_old_checkpoints import load_with_install
from tests.phases import Phases
from vime_optim.verify.runner import CaseRun


@pytest.mark.parametrize("release", ["0.19.2"])
def test_stock_reads_what_was_saved_gather_free(
    release: str, launchers: LauncherPool, tmp_path: Path
) -> None:
    """The files are Megatron's own: stock loads ours at another DP and goes on exactly."""
    case = Case.parse(f"{release},hybrid,pao,f=1,dp=3->2")
    launcher = launchers.get(release)
    CaseRun(launcher, case, tmp_path).save(separate_continuous=False)
    outcome = load_with_install(launcher, case.replace(install=False), tmp_path)
    assert outcome.exact, outcome.summary()


@pytest.mark.parametrize(
    "words",
    [
        "0.16.1,fused,nopao,dp_reshardable,dp=2",
        "0.16.1,fused,pao,dp=2",
        pytest.param("0.16.1,hybrid,dp=2", marks=pytest.mark.matrix),
        pytest.param("0.19.2,fused,pao,m=bf16,dp=2", marks=pytest.mark.matrix),
    ],
)
def test_a_deep_copy_is_saved_and_loaded_into(words: str, phases: Phases) -> None:
    """Stock's state dicts can be copied and, as dp_reshardable, pickled; ours led to the optimizer,
    whose process groups cannot."""
    case = Case.parse(words)
    phases.run("tests.fixes.copied_job:save", case)
    pickles = case.sharding == "dp_reshardable"
    phases.run("tests.fixes.copied_job:resume", case, loading=True, pickles=pickles)
    assert phases.differences("saved_3", "loaded", skip=["grad"]) == []
    assert phases.differences("continuous", "resumed") == []

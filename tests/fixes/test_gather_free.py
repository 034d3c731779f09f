"""What is saved without gathering is a file of Megatron (F10, F11)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases import Case
from tests.conftest import LauncherPool
from tests.fixes.test_old_checkpoints import load_with_install
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

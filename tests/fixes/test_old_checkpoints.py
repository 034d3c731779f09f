"""Checkpoints that trees without vime_optim wrote, the broken ones included, load exactly."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.cases import Case
from tests.conftest import LauncherPool
from vime_optim.tools.megatron_source import fetch
from vime_optim.verify.launch import ForkLauncher
from vime_optim.verify.runner import CaseRun, Outcome

STEP_CHECK = re.compile(
    r"^(?P<indent> +)assert tensors\[key\]\.shape == \(gbuf_local_end - gbuf_local_start,\)", re.M
)


def with_continue_patch(release: str, folder: Path) -> Path:
    """A copy of a release with the patch that many trees carry: `step` is passed over."""
    tree = folder / f"{release}-continue"
    shutil.copytree(fetch(release), tree)
    path = tree / "megatron/core/optimizer/distrib_optimizer.py"
    source = path.read_text()
    patched, count = STEP_CHECK.subn(
        lambda m: f"{m['indent']}if key == 'step':\n{m['indent']}    continue\n{m.group(0)}", source
    )
    assert count == 1
    path.write_text(patched)
    return tree


def save_without_install(launcher: ForkLauncher, case: Case, folder: Path) -> None:
    CaseRun(launcher, case.replace(install=False), folder).save(separate_continuous=False)


def load_with_install(launcher: ForkLauncher, case: Case, folder: Path) -> Outcome:
    run = CaseRun(launcher, case, folder)
    run.load(case.num_steps)
    return run.outcome


def test_a_per_rank_list_of_steps_is_mended(launchers: LauncherPool, tmp_path: Path) -> None:
    """F2: saved at DP=3 by a 0.15.3 tree with the `continue` patch."""
    tree = with_continue_patch("0.15.3", tmp_path)
    case = Case.parse("0.15.3,hybrid,pao,f=1,dp=3,dp_reshardable")
    folder = tmp_path / "checkpoint"
    with ForkLauncher(tree) as patched:
        save_without_install(patched, case, folder)
        # The tree itself cannot load what it saved, so the fixture is the fault.
        with pytest.raises(Exception, match=r"Cannot merge two lists|UnpicklingError|Weights only"):
            load_with_install(patched, case.replace(install=False), folder)
        # install() works on the patched tree as well.
        outcome = load_with_install(patched, case, folder)
        assert outcome.exact, outcome.summary()
        assert outcome.hits["common-state"] > 0
    outcome = load_with_install(launchers.get("0.15.3"), case, folder)
    assert outcome.exact, outcome.summary()
    assert outcome.sound


@pytest.mark.parametrize("release", ["0.16.1", pytest.param("0.19.2", marks=pytest.mark.matrix)])
def test_the_step_that_stock_freezes_is_right(
    release: str, launchers: LauncherPool, tmp_path: Path
) -> None:
    """F3: the file is whole, and stock loads a wrong step from it."""
    case = Case.parse(f"{release},hybrid,pao,f=1,dp=3,dp_reshardable")
    launcher = launchers.get(release)
    save_without_install(launcher, case, tmp_path)
    stock = load_with_install(launcher, case.replace(install=False), tmp_path)
    loaded = stock.stages[0]
    assert loaded.kinds == {"step": 11}, stock.summary()
    assert all(text.endswith(": 1.0 instead of 3.0") for text in loaded.differences)
    outcome = load_with_install(launcher, case, tmp_path)
    assert outcome.exact, outcome.summary()
    assert outcome.sound


@pytest.mark.parametrize("release", ["0.15.3", pytest.param("0.18.2", marks=pytest.mark.matrix)])
def test_classes_in_the_common_state_are_inert(
    release: str, launchers: LauncherPool, tmp_path: Path
) -> None:
    """F9: stock writes optimizer classes, and cannot read them under weights_only."""
    # One bucket: with several, stock's own file is wrong, see the next test.
    case = Case.parse(f"{release},hybrid,pao,f=1,dp=2,1bucket")
    launcher = launchers.get(release)
    save_without_install(launcher, case, tmp_path)
    with pytest.raises(Exception, match="Weights only load failed"):
        load_with_install(launcher, case.replace(install=False), tmp_path)
    outcome = load_with_install(launcher, case, tmp_path)
    assert outcome.exact, outcome.summary()
    assert outcome.sound


@pytest.mark.matrix  # tests/verify/test_stock.py shows it sooner
def test_stock_shifts_states_behind_a_padded_bucket(
    launchers: LauncherPool, tmp_path: Path
) -> None:
    """Stock packs buckets without their padding and cuts parameters as if it were there.

    The elements that its file lacks are lost; a file of ours holds every one.
    """
    case = Case.parse("0.19.2,hybrid,pao,f=1,dp=2")
    launcher = launchers.get("0.19.2")
    save_without_install(launcher, case, tmp_path / "stock")
    stock = load_with_install(launcher, case.replace(install=False), tmp_path / "stock")
    assert any("exp_avg" in text for text in stock.differences)
    CaseRun(launcher, case, tmp_path / "ours").save(separate_continuous=False)
    outcome = load_with_install(launcher, case.replace(install=False), tmp_path / "ours")
    assert outcome.exact, outcome.summary()

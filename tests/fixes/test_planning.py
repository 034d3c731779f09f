"""Plans that two real ranks send one another, on every release; what they save, stock loads."""

from pathlib import Path

import pytest
from clients import nvrx

from tests.conftest import LauncherPool
from tests.writer.launch import launch, results, tree_of
from vime_optim.tools.megatron_source import RELEASES

QUICK = ("0.16.1", "0.19.2")


releases = pytest.mark.parametrize(
    "release", [r if r in QUICK else pytest.param(r, marks=pytest.mark.matrix) for r in RELEASES]
)


@releases
def test_megatrons_own_cache_of_plans_stays_on(
    release: str, launchers: LauncherPool, tmp_path: Path
) -> None:
    launcher = launchers.get(release)
    payload = {"directory": str(tmp_path / "saved"), "saves": list(range(7))}
    for answer in launcher.run(
        "tests.planning.plan_job:cached", world_size=2, payload=payload, out=tmp_path / "save"
    ):
        assert answer["differ"] == []
        assert answer["errors"] == [""] * 7
        # Megatron takes two saves to trust its cache, and none when it has the plans from a load.
        assert answer["after"][2:] == [2] * 4 + [3]
    for answer in launcher.run(
        "tests.planning.plan_job:loads", world_size=2, payload=payload, out=tmp_path / "load"
    ):
        assert answer["equal"] == {str(n): True for n in range(7)}


@releases
def test_plans_are_sent_once_and_wrong_ones_refused_everywhere(
    release: str, launchers: LauncherPool, tmp_path: Path
) -> None:
    launcher = launchers.get(release)
    payload = {"directory": str(tmp_path / "saved"), "saves": [0, 2, 3, 6]}
    answers = launcher.run(
        "tests.planning.plan_job:saves", world_size=2, payload=payload, out=tmp_path / "save"
    )
    for rank, answer in enumerate(answers):
        assert answer["errors"][:4] == [""] * 4
        assert answer["errors"][5:] == [""] * 2
        # Known once all ranks agreed; unknown again after a failure, on every rank.
        if release != "0.15.3":
            wrong = "_Sent" if rank == 1 else "_Same"
            expected = ["_Sent", "_Same", "_Same", "_Sent", wrong, "_Sent", "_Same"]
            assert answer["sent"] == expected
        assert "PlanError" in answer["errors"][4]
        assert "ranks 0 and 1" in answer["errors"][4]
        assert "offset [1, 1, 1, 0] size [1, 1, 7, 16]" in answer["errors"][4]
        assert not [name for name in answer["written"] if name != "common.pt"]
    (checked,) = launcher.run(
        "tests.planning.plan_job:integrity",
        world_size=1,
        payload={"cases": 300},
        out=tmp_path / "integrity",
    )
    assert checked["differ"] == []
    assert min(checked["passed"], checked["refused"]) > 30
    # Nearly every sound set is proved without megatron-core's own check.
    assert checked["proved"] > checked["passed"] / 2
    loaded = launcher.run(
        "tests.planning.plan_job:loads", world_size=2, payload=payload, out=tmp_path / "load"
    )
    for answer in loaded:
        assert answer["equal"] == {"0": True, "2": True, "3": True, "6": True}


@pytest.mark.ci  # fetches the package where it is not there yet
def test_plans_of_nvidia_resiliency_ext_are_ours_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VIME_OPTIM_TEST_PATH", str(nvrx.find()))
    arguments = {"root": str(tmp_path), "strategy": "nvrx"}
    everything = {"VIME_OPTIM_TEST_ALL": "1"}
    outcomes = launch(tree_of("0.19.2"), "planned", arguments=arguments, environment=everything)
    theirs = "nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver"
    for rank in results(outcomes):
        assert rank == {"wrong": [], "agreed": [theirs, "nvrx"] * 2}

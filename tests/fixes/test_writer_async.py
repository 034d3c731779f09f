"""Real async saves on the simulated device: exact against a stopped writer, and loud in trouble.

One launch runs many cases, because importing megatron-core and starting ranks is most of the time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.writer.launch import launch, results, tree_of

SMALL_UNITS = {"mode": "guard", "unit_bytes": 1 << 17}
WAITING = {"mode": "guard", "unit_bytes": 1 << 17, "stage_bytes": 0}
STAGED = {"mode": "stage"}
OFF = {"mode": "off", "persistent": False}
SYNC = {"mode": "sync"}
EXACT_CASES: list[dict[str, Any]] = [
    SMALL_UNITS,
    WAITING,
    {"mode": "guard", "persistent": False, "shared": True},
    STAGED,
    OFF,
    SYNC,
]


@pytest.fixture(scope="module")
def exact_0_16_1(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    root = tmp_path_factory.mktemp("exact")
    cases = {"root": str(root), "cases": EXACT_CASES}
    return results(launch(tree_of("0.16.1"), "exact", world=2, arguments=cases))


@pytest.fixture(scope="module")
def exact_0_19_2(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    root = tmp_path_factory.mktemp("exact")
    early = [{"start_method": method} for method in ("forkserver", "fork")]
    cases = [SMALL_UNITS, STAGED, *early, SYNC]
    arguments = {"root": str(root), "cases": cases}
    return results(launch(tree_of("0.19.2"), "exact", world=3, arguments=arguments))


def test_saves_of_0_16_1_are_exact(exact_0_16_1: Any) -> None:
    for ranks in exact_0_16_1:
        for outcome in ranks:
            assert not any(outcome["torn"]), outcome["case"]
            # VIME_OPTIM_ASYNC=off leaves the files to Megatron.
            assert outcome["manifest"] == (outcome["case"] != OFF), outcome["case"]


def test_saves_of_0_19_2_on_three_ranks_are_exact(exact_0_19_2: Any) -> None:
    for ranks in exact_0_19_2:
        for outcome in ranks:
            assert not any(outcome["torn"]), outcome["case"]
            assert outcome["manifest"], outcome["case"]


def test_an_update_copies_what_is_not_written_yet(exact_0_16_1: Any, exact_0_19_2: Any) -> None:
    """The writers were held until two steps were over: all but what they had begun with."""
    for ranks in (*exact_0_16_1, *exact_0_19_2):
        small = next(outcome for outcome in ranks if outcome["case"] == SMALL_UNITS)
        assert small["async save bytes copied"] > 1 << 20


def test_without_room_an_update_waits(exact_0_16_1: Any) -> None:
    for ranks in exact_0_16_1:
        waiting = ranks[1]
        assert waiting["case"] == WAITING
        assert waiting["async save waits"] >= 1


def test_staged_saves_do_not_hold_up_the_step(exact_0_16_1: Any, exact_0_19_2: Any) -> None:
    for ranks in (*exact_0_16_1, *exact_0_19_2):
        staged = next(outcome for outcome in ranks if outcome["case"] == STAGED)
        assert staged["async save waits"] == 0


def test_a_save_starts_no_process(exact_0_16_1: Any, exact_0_19_2: Any) -> None:
    """A worker that was started early stays as it is."""
    for ranks in (*exact_0_16_1, *exact_0_19_2):
        early = 0
        for outcome in ranks:
            if outcome["case"] in (OFF, SYNC):
                continue
            early += "start_method" in outcome["case"]
            assert max(outcome["children"]) <= early, outcome["case"]


def test_a_sync_save_stages_nothing(exact_0_16_1: Any, exact_0_19_2: Any) -> None:
    """The file writer takes the device tensors, through a window."""
    for ranks in (*exact_0_16_1, *exact_0_19_2):
        sync = ranks[-1]
        assert sync["case"] == {"mode": "sync"}
        assert sync["staged"] == 0
        assert sum(sync["pieces"]) > 1 << 20


def test_saves_under_overlap_are_exact(tmp_path: Path) -> None:
    """A small version of tests/writer/overlap.py, which runs 1,000."""
    values = {"root": str(tmp_path), "saves": 20, "seed": 7}
    for outcome in results(launch(tree_of("0.18.2"), "overlap", arguments=values)):
        assert outcome["wrong"] == []
        assert outcome["done"] == 20
        assert outcome["counters"]["async save bytes copied"] > 0


@pytest.mark.matrix
def test_stock_saves_are_torn(tmp_path: Path) -> None:
    """What the cases above guard against: without the fixes the same case holds later values.

    With 0.19.2, whose worker writes by threads: stopping it stops the write.
    """
    arguments = {
        "root": str(tmp_path),
        "cases": [{"rounds": 1, "numel": 1 << 22}],
        "install": False,
    }
    outcomes = results(launch(tree_of("0.19.2"), "exact", world=2, arguments=arguments))
    assert outcomes[0][0]["torn"] != [[]]


PERSISTENT = [
    "failed_writer:persistent",
    "full_disk:persistent",
    "unguarded_update:persistent",
    "two_jobs:persistent",
    "several_in_flight:persistent",
    "exit_in_flight:persistent",
    "uninstalled:persistent",
    "killed_process:persistent",
]
FORKED = [
    "failed_writer:forked",
    "full_disk:forked",
    "full_disk_sync:forked",
    "full_disk_for_metadata:forked",
    "full_disk_for_common:forked",
    "stuck_writer:forked",
    "unwritable:forked",
    "overwritten:forked",
    "damaged:forked",
    "two_saves:forked",
    "directory_replaced:forked",
    "file_removed:forked",
    "common_removed:forked",
    "flat:forked",
    "several_in_flight:forked",
    "exit_in_flight:forked",
    "uninstalled:forked",
    "killed_process:forked",
]


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Outcome of each scenario, by name, rank by rank."""
    found: dict[str, list[dict[str, Any]]] = {}
    for tree, names in (("0.19.2", PERSISTENT), ("0.16.1", FORKED)):
        root = tmp_path_factory.mktemp("failures")
        arguments = {"root": str(root), "names": names}
        ranks = results(launch(tree_of(tree), "failures", world=2, arguments=arguments))
        found.update({name: [rank[name] for rank in ranks] for name in names})
    return found


def raised_everywhere(ranks: list[dict[str, Any]], *words: str) -> None:
    """Every rank raises the cause itself. One that waits for another in vain would not: the launch
    would be killed, or the wait would raise what torch says of it."""
    for outcome in ranks:
        raised = outcome["raised"]
        assert raised["type"] == "WriterError", raised
        for word in words:
            assert word in raised["text"], raised["text"]


def nothing_points_to_it(ranks: list[dict[str, Any]]) -> None:
    for outcome in ranks:
        assert outcome["finished"] == []


def refused_everywhere(ranks: list[dict[str, Any]]) -> None:
    for outcome in ranks:
        assert outcome["load"]["type"] == "CheckpointError", outcome["load"]
        assert "did not finish" in outcome["load"]["text"]
        assert outcome["load"]["unchanged"]


@pytest.mark.parametrize("kind", ["persistent", "forked"])
def test_a_failed_writer_raises_on_every_rank(failed: Any, kind: str) -> None:
    ranks = failed[f"failed_writer:{kind}"]
    raised_everywhere(ranks, "rank 1:", "No space left on device", "__1_")
    nothing_points_to_it(ranks)
    refused_everywhere(ranks)
    assert [outcome["good"] for outcome in ranks] == [[], []]


@pytest.mark.parametrize("kind", ["persistent", "forked"])
def test_a_killed_process_of_another_writer_raises_on_every_rank(failed: Any, kind: str) -> None:
    ranks = failed[f"killed_process:{kind}"]
    raised_everywhere(ranks, "rank 1:")
    nothing_points_to_it(ranks)
    assert [outcome["good"] for outcome in ranks] == [[], []]


@pytest.mark.parametrize("kind", ["persistent", "forked"])
def test_several_saves_in_flight_are_exact(failed: Any, kind: str) -> None:
    for outcome in failed[f"several_in_flight:{kind}"]:
        assert outcome["torn"] == [[], [], []]
        assert outcome["order"] == sorted(outcome["order"])
        assert len(outcome["order"]) == 3


@pytest.mark.parametrize("kind", ["persistent", "forked"])
def test_an_aborted_save_leaves_nothing_that_looks_complete(failed: Any, kind: str) -> None:
    for outcome in failed[f"exit_in_flight:{kind}"]:
        assert outcome["unfinished"] == 2
        assert outcome["left"] == 0
        assert all(name.startswith("next/") for name in outcome["finished"])
        assert outcome["good"] == []


@pytest.mark.parametrize("kind", ["persistent", "forked"])
def test_uninstall_finishes_a_save(failed: Any, kind: str) -> None:
    for outcome in failed[f"uninstalled:{kind}"]:
        assert outcome["raised"]["type"] is None
        assert outcome["torn"] == []


@pytest.mark.parametrize(
    "name", ["full_disk:persistent", "full_disk:forked", "full_disk_sync:forked"]
)
def test_a_full_disk_raises_on_every_rank(failed: Any, name: str) -> None:
    ranks = failed[name]
    raised_everywhere(ranks, "rank 1:", "No space left on device", "_0.distcp")
    nothing_points_to_it(ranks)
    refused_everywhere(ranks)
    assert [outcome["good"] for outcome in ranks] == [[], []]


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("full_disk_for_metadata", "No space left on device"),
        ("full_disk_for_common", "iostream error"),  # all that torch says of it
    ],
)
def test_what_rank_0_alone_cannot_write_is_raised_by_all(
    failed: Any, name: str, cause: str
) -> None:
    ranks = failed[f"{name}:forked"]
    raised_everywhere(ranks, "rank 0:", cause)
    nothing_points_to_it(ranks)
    assert [outcome["good"] for outcome in ranks] == [[], []]


def test_a_stuck_writer_is_given_up(failed: Any) -> None:
    ranks = failed["stuck_writer:forked"]
    raised_everywhere(ranks, "rank 1:", "made no progress")
    nothing_points_to_it(ranks)
    assert [outcome["good"] for outcome in ranks] == [[], []]


def test_an_update_past_the_guard_is_found_out(failed: Any) -> None:
    ranks = failed["unguarded_update:persistent"]
    raised_everywhere(ranks, "rank 1:", "updated in place while")
    nothing_points_to_it(ranks)


def test_an_overwritten_checkpoint_is_whole_or_refused(failed: Any) -> None:
    ranks = failed["overwritten:forked"]
    assert [outcome["whole"]["type"] for outcome in ranks] == [None, None]
    raised_everywhere(ranks, "No space left on device")
    refused_everywhere(ranks)


def test_two_jobs_cannot_save_to_one_directory(failed: Any) -> None:
    ranks = failed["two_jobs:persistent"]
    raised_everywhere(ranks, "rank 0:", "another save is writing to it")
    assert [outcome["good"] for outcome in ranks] == [[], []]


def test_two_saves_of_one_process_to_one_directory(failed: Any) -> None:
    for outcome in failed["two_saves:forked"]:
        assert outcome["raised"]["type"] is None, outcome["raised"]["text"]
        assert (outcome["good"], outcome["load"], outcome["lock"]) == ([], None, False)


@pytest.mark.parametrize("name", ["directory_replaced", "file_removed"])
def test_a_save_whose_files_are_gone_is_not_completed(failed: Any, name: str) -> None:
    ranks = failed[f"{name}:forked"]
    raised_everywhere(ranks)
    for outcome in ranks:
        text = outcome["raised"]["text"]
        assert "the file is missing" in text or "No such file" in text, text
    nothing_points_to_it(ranks)
    assert ranks[0].get("good", []) == []


def test_a_save_whose_common_state_is_gone_is_not_completed(failed: Any) -> None:
    ranks = failed["common_removed:forked"]
    raised_everywhere(ranks, "common.pt", "gone since it was written")
    nothing_points_to_it(ranks)


def test_saves_leave_nothing_behind(failed: Any) -> None:
    """Descriptors, threads, processes and shared memory; resident memory is the campaign's."""
    for outcome in failed["flat:forked"]:
        early, late = outcome["held"]
        for name in ("fds", "threads", "children"):
            assert late[name] <= early[name], (name, early, late)
        assert late["wrong"] == 0


def test_an_unwritable_directory_is_refused_before_anything_is_written(failed: Any) -> None:
    ranks = failed["unwritable:forked"]
    raised_everywhere(ranks, "rank 0:", "metadata.json")
    assert [outcome["files"] for outcome in ranks] == [["metadata.json"]] * 2


def test_damage_is_refused_before_a_load_changes_anything(failed: Any) -> None:
    for outcome in failed["damaged:forked"]:
        assert outcome["whole"]["type"] is None
        for name in ("flipped", "cut"):
            assert outcome[name]["type"] == "CheckpointError", outcome[name]
            assert outcome[name]["unchanged"], name
            assert outcome["file"] in outcome[name]["text"]
        assert "bytes [0, " in outcome["flipped"]["text"]
        assert "optimizer" in outcome["flipped"]["text"]

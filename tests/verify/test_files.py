from __future__ import annotations

from pathlib import Path

import pytest

from vime_optim.errors import CheckpointError
from vime_optim.verify.directory import TRACKER, find_checkpoint, iteration_dir, latest_iteration


def _checkpoint(directory: Path, iteration: int) -> None:
    folder = iteration_dir(directory, iteration)
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text("{}")


def test_names_are_megatrons(tmp_path: Path) -> None:
    assert iteration_dir(tmp_path, 3).name == "iter_0000003"
    assert TRACKER == "latest_checkpointed_iteration.txt"


def test_the_latest_or_the_asked_one(tmp_path: Path) -> None:
    _checkpoint(tmp_path, 2)
    _checkpoint(tmp_path, 4)
    (tmp_path / TRACKER).write_text("4\n")

    assert find_checkpoint(tmp_path, None) == 4
    assert find_checkpoint(tmp_path, 2) == 2


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint to load"):
        find_checkpoint(tmp_path, None)


def test_a_missing_step_names_those_that_are_there(tmp_path: Path) -> None:
    _checkpoint(tmp_path, 2)
    with pytest.raises(CheckpointError, match="iter_0000002"):
        find_checkpoint(tmp_path, 3)


def test_a_folder_that_was_never_finished_is_not_a_checkpoint(tmp_path: Path) -> None:
    iteration_dir(tmp_path, 3).mkdir()
    (tmp_path / TRACKER).write_text("3")
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        find_checkpoint(tmp_path, None)


def test_a_tracker_without_a_number(tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("release")
    with pytest.raises(CheckpointError, match="names no iteration"):
        latest_iteration(tmp_path)

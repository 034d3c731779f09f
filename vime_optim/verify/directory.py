"""Megatron's layout of a checkpoint directory.

DIR/iter_0000003/                         one checkpoint
DIR/latest_checkpointed_iteration.txt     the newest one that is whole
"""

from __future__ import annotations

from pathlib import Path

from vime_optim.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"


def iteration_dir(directory: Path, iteration: int) -> Path:
    """Megatron's folder name for one iteration."""
    return directory / f"iter_{iteration:07d}"


def latest_iteration(directory: Path) -> int:
    """The iteration that the tracker file names.

    Raises:
        CheckpointError: there is no tracker file, or it holds no number.
    """
    tracker = directory / TRACKER
    try:
        return int(tracker.read_text().strip())
    except FileNotFoundError:
        raise CheckpointError(
            "there is no checkpoint to load",
            where=str(directory),
            got=f"no {TRACKER}",
            next_step="save first: vime-optim verify --phase save --dir DIR",
        ) from None
    except ValueError:
        raise CheckpointError(
            "the tracker file names no iteration",
            where=str(tracker),
            got=repr(tracker.read_text()[:40]),
            next_step="name one with --ckpt-step",
        ) from None


def find_checkpoint(directory: Path, step: int | None) -> int:
    """The iteration to load: `step`, or the latest.

    Raises:
        CheckpointError: no checkpoint at all, or not of that step.
    """
    iteration = latest_iteration(directory) if step is None else step
    if not (iteration_dir(directory, iteration) / "metadata.json").is_file():
        there = sorted(path.parent.name for path in directory.glob("iter_*/metadata.json"))
        raise CheckpointError(
            f"there is no checkpoint of step {iteration}",
            where=str(iteration_dir(directory, iteration)),
            got=", ".join(there) or "no whole checkpoint at all",
            next_step="name one of those with --ckpt-step" if there else "save one first",
        )
    return iteration

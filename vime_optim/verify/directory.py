"""The directory of a verify job: checkpoints in Megatron's layout, and what verify adds.

DIR/iter_0000003/                         one checkpoint
DIR/latest_checkpointed_iteration.txt     the newest one that is whole
DIR/verify/                               the case, captured states, output of the ranks
DIR/.vime-verify.lock                     held by the one job that works here
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vime_optim.errors import CheckpointError, VerifyError

TRACKER = "latest_checkpointed_iteration.txt"
LOCK_NAME = ".vime-verify.lock"


@dataclass(frozen=True)
class Workplace:
    directory: Path

    @property
    def captures(self) -> Path:
        return self.directory / "verify" / "captures"

    @property
    def logs(self) -> Path:
        return self.directory / "verify" / "logs"

    @property
    def case_file(self) -> Path:
        return self.directory / "verify" / "case.json"

    def check_own(self) -> None:
        """Only a checkpoint directory of verify's own may be written over.

        Raises:
            VerifyError: it holds checkpoints of somebody else.
        """
        if any(self.directory.glob("iter_*")) and not self.case_file.is_file():
            raise VerifyError(
                "the directory holds checkpoints that verify did not write",
                where=str(self.directory),
                next_step="choose an empty or new --dir",
            )

    def clear(self) -> None:
        for path in (*self.directory.glob("iter_*"), self.directory / "verify"):
            shutil.rmtree(path, ignore_errors=True)
        (self.directory / TRACKER).unlink(missing_ok=True)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the directory for this process; ends with the process, however it ends.

    Raises:
        VerifyError: another process holds it.
    """
    with (directory / LOCK_NAME).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise VerifyError(
                "another verify job works in this directory",
                where=str(directory),
                got=f"{LOCK_NAME} held by process {lock.read().strip() or '(unknown)'}",
                next_step="wait for it to end, or choose another --dir",
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


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

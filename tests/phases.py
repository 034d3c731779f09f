"""Runs functions of the verify job, and of the tests' `*_job.py`, on the ranks of a case."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.cases import Case
from vime_optim.verify.compare import State, compare, load_state


class Phases:
    """Launches, one after the other, that share a folder of checkpoints and captures.

    Args:
        launchers: see conftest.LauncherPool.
    """

    def __init__(self, launchers: Any, folder: Path) -> None:
        self._launchers = launchers
        self._folder = folder
        self.checkpoint = folder / "checkpoint"

    def run(self, target: str, case: Case, *, loading: bool = False, **more: Any) -> list[Any]:
        """What "module:function" answers on each rank of the case's saving or loading side.

        Args:
            more: what the function finds in its payload beside the case, its folders and `step`.
        """
        payload = {
            "case": case.to_dict(),
            "directory": str(self.checkpoint),
            "captures": str(self._folder / "captures"),
            "step": case.num_steps,
            **more,
        }
        return self._launchers.get(case.megatron).run(
            target,
            world_size=(case.load_layout if loading else case.layout).world_size,
            payload=payload,
            out=self._folder / target.partition(":")[2],
        )

    def state(self, name: str) -> State:
        """What all ranks captured under that name."""
        return load_state(self._folder / "captures" / name)

    def differences(self, first: str, second: str, skip: Iterable[str] = ()) -> list[str]:
        found = compare(self.state(first), self.state(second), skip=skip)
        return [str(difference) for difference in found]

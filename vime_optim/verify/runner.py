"""Runs one case: save, fresh ranks, load, compare. Used by `vime-optim verify` and the tests."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime_optim.errors import VerifyError
from vime_optim.verify.case import Case
from vime_optim.verify.directory import Workplace
from vime_optim.verify.launch import LAUNCH_TIMEOUT_S, Launcher, RankFailure, TemplateError

if TYPE_CHECKING:
    from vime_optim.verify.compare import Difference

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_JOB = "vime_optim.verify.job:"
#: What a phase does, for people who wait.
DOING = {
    "save": "training and saving",
    "continuous": "training in a run that never saves",
    "resume": "loading in fresh processes and training on",
    "reference": "training from the same checkpoint in another way",
}
_OF_A_STEP = {"exp_avg", "exp_avg_sq", "step"}
"""What every optimizer holds after one step; without it, an equal comparison proves little."""


@dataclass(frozen=True)
class Stage:
    """One comparison. `differences` as texts, in order of kind and name."""

    name: str
    compared: int
    differences: list[str]
    kinds: dict[str, int] = field(default_factory=dict)


@dataclass
class Outcome:
    """What became of a case."""

    case: Case
    stages: list[Stage] = field(default_factory=list)
    failed_in: str | None = None
    error: str | None = None
    error_type: str | None = None
    traceback: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def exact(self) -> bool:
        """Everything ran, something was compared, and not one bit differs."""
        return self.error is None and bool(self.stages) and not self.differences

    @property
    def sound(self) -> bool:
        """The restored state was measured, owns its storage and holds no more bytes than it has."""
        memory = self.facts.get("memory")
        if memory is None or (not memory["own_bytes"] and self.case.has_moments):
            return False
        return not memory["aliased"] and bool(memory["held_bytes"] == memory["own_bytes"])

    @property
    def differences(self) -> list[str]:
        return [text for stage in self.stages for text in stage.differences]

    def summary(self) -> str:
        """One line."""
        if self.error is not None:
            return f"{self.failed_in} failed: {self.error_type}: {self.error.splitlines()[0]}"
        if not self.stages:
            return "nothing was compared"
        if not self.differences:
            return "exact" if self.sound else f"exact, but unsound: {self._memory()}"
        parts = [
            f"{stage.name}: {len(stage.differences)} of {stage.compared}"
            f" ({', '.join(f'{kind} {count}' for kind, count in stage.kinds.items())})"
            for stage in self.stages
            if stage.differences
        ]
        return "differs: " + "; ".join(parts)

    def _memory(self) -> str:
        memory = self.facts.get("memory", {})
        return (
            f"{memory.get('held_bytes')} bytes held for {memory.get('own_bytes')},"
            f" {len(memory.get('aliased', []))} aliased"
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "case": self.case.name,
            "exact": self.exact,
            "sound": self.sound if "memory" in self.facts else None,
            **{key: value for key, value in asdict(self).items() if key != "case"},
        }


class CaseRun:
    """The phases of one case on one launcher; each fills in the outcome."""

    def __init__(
        self,
        launcher: Launcher,
        case: Case,
        directory: Path,
        timeout_s: float = LAUNCH_TIMEOUT_S,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._tell = tell
        self.case = case
        self.place = Workplace(directory.absolute())
        self.outcome = Outcome(case)
        self._launcher = launcher
        self._timeout_s = timeout_s
        self._side = "save"

    def phase(self, name: str, step: int | None = None) -> list[dict[str, Any]]:
        """Run one function of job.py on all ranks of its side's layout."""
        self._tell(DOING.get(name, name))
        loading = name in ("resume", "reference")
        layout = self.case.load_layout if loading else self.case.layout
        payload = {
            "case": self.case.to_dict(),
            "directory": str(self.place.directory),
            "captures": str(self.place.captures),
            "step": step,
        }
        results = self._launcher.run(
            _JOB + name,
            world_size=layout.world_size,
            payload=payload,
            out=self.place.logs / name,
            timeout_s=self._timeout_s,
        )
        for result in results:
            for fix, count in result["hits"].items():
                self.outcome.hits[fix] = self.outcome.hits.get(fix, 0) + count
        return results

    def save(self, *, separate_continuous: bool) -> None:
        """Train and save; with `separate_continuous` also train in a run that never saves."""
        self._side = "save"
        self.place.case_file.parent.mkdir(parents=True, exist_ok=True)
        self.place.case_file.write_text(json.dumps(self.case.to_dict(), indent=2))
        self.phase("save")
        if separate_continuous:
            self.phase("continuous")
            self._compare("saving changes nothing", "continuous", "after_save")

    def load(self, step: int) -> None:
        """Load in fresh ranks, train on, and compare with what the first run did."""
        self._side = "load"
        results = self.phase("resume", step)
        self.outcome.facts.update(_facts(results))
        case = self.case
        if case.model_only:
            self._compare("loaded", f"saved_{step}", "loaded", only={"model"})
        else:
            self._compare("loaded", f"saved_{step}", "loaded", skip=self._load_skip())
        if case.goes_on_alike:
            has_own = (self.place.captures / "continuous").is_dir()
            self._compare("resumed", "continuous" if has_own else "after_save", "resumed")
        elif case.more_steps:
            self.phase("reference", step)
            self._compare("resumed", "reference", "resumed")

    def record(self, error: VerifyError) -> None:
        """Put the failure of a save or a load into the outcome."""
        outcome = self.outcome
        outcome.failed_in = self._side
        if isinstance(error, RankFailure):
            plain = _ESCAPES.sub("", error.message).strip()  # torch prints some of them in bold
            outcome.error, outcome.error_type = plain or error.what, error.error_type
            outcome.traceback = error.traceback
        else:
            outcome.error, outcome.error_type = str(error), type(error).__name__

    def _load_skip(self) -> set[str]:
        """What a load does not restore: gradients, and of another layout or optimizer some more."""
        saved, loaded = self.case.layout, self.case.load_layout
        same_ranks = (saved.tp, saved.pp) == (loaded.tp, loaded.pp)
        kinds = set() if self.case.same_backend else {"kinds"}
        return {"grad"} | kinds | (set() if same_ranks else {"rng"})

    def _compare(
        self,
        stage: str,
        expected: str,
        got: str,
        *,
        skip: set[str] | None = None,
        only: set[str] | None = None,
    ) -> None:
        from vime_optim.verify.compare import compare, drop_inert, load_state

        first = load_state(self.place.captures / expected)
        second = load_state(self.place.captures / got)
        left_out = set(skip or ()) | self.case.not_compared
        if only is not None:
            left_out |= {*first.kinds(), *second.kinds()} - only
        crossed = not self.case.same_backend
        unstepped = drop_inert(first, second)
        if unstepped:
            left_out.add("kinds")
        found = compare(
            first,
            second,
            skip=left_out,
            round_to_got=crossed or unstepped,  # a parameter that has no master yet is its own
            # Comparing with the reference run needs no rounding: it started from rounded masters.
            tied_masters=crossed and stage == "loaded" and self.case.load_backend.keeps_remainders,
        )
        names = {*first.tensors, *first.values}
        compared = len([key for key in names if key[0] not in left_out])
        found += self._not_compared({kind for kind, _ in names} - left_out, only)
        kinds: dict[str, int] = {}
        for difference in found:
            kinds[difference.kind] = kinds.get(difference.kind, 0) + 1
        self.outcome.stages.append(Stage(stage, compared, [str(d) for d in found], kinds))

    def _not_compared(self, compared: set[str], only: set[str] | None) -> list[Difference]:
        """The kinds that a comparison cannot do without and that the first capture lacked."""
        from vime_optim.verify.compare import Difference

        floor = set(only or ("model",))
        if only is None and self.case.has_moments:
            floor |= _OF_A_STEP
        return [
            Difference(kind, "all names", "nothing was captured, so nothing was compared", 0, 0)
            for kind in sorted(floor - compared)
        ]


def _facts(results: list[dict[str, Any]]) -> dict[str, Any]:
    memories = [result["memory"] for result in results]
    return {
        "rng_untouched": all(result["rng_untouched"] for result in results),
        "memory": {
            "own_bytes": sum(memory["own_bytes"] for memory in memories),
            "held_bytes": sum(memory["held_bytes"] for memory in memories),
            "aliased": [
                f"rank {rank}: {text}"
                for rank, memory in enumerate(memories)
                for text in memory["aliased"]
            ],
        },
    }


def run_case(
    launcher: Launcher,
    case: Case,
    directory: Path,
    *,
    step: int | None = None,
    separate_continuous: bool = False,
    timeout_s: float = LAUNCH_TIMEOUT_S,
) -> Outcome:
    """Save, load in fresh ranks, compare. Failures of the job end up in the outcome."""
    began_s = time.monotonic()
    run = CaseRun(launcher, case, directory, timeout_s)
    try:
        run.save(separate_continuous=separate_continuous)
        run.load(case.num_steps if step is None else step)
    except TemplateError:
        raise
    except VerifyError as error:
        run.record(error)
    run.outcome.seconds = time.monotonic() - began_s
    return run.outcome

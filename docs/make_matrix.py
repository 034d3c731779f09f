"""Makes docs/matrix.md from results of the resume matrix.

    python -m docs.make_matrix RESULTS.json

RESULTS.json is a list, or one object a line as `python -m tests.bench --json` prints
them: objects with the keys `case` (its compact spelling), `exact`, `sound` and `error`. Without an
argument the page says that there are no results yet.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.cases import Case
from vime_optim.tools import support

PAGE = Path(__file__).parent / "matrix.md"
TOGETHER = f"""## Versions that go together

The oldest of each; Megatron's own needs, with or without vime_optim. `vime-optim doctor` says what
does not fit. Unpacked or checked out, megatron-core also runs on an older Python than its wheel
asks for; vime_optim needs 3.10.

{support.markdown()}
"""
HEAD = """# Support matrix

Each cell counts cases that resume exactly with install(): train, save, load in fresh processes,
train on, compare every bit with an uninterrupted run. The cases are in
`tests/matrix.py`; `make matrix` runs them all, CI a spread of them. A cell counts the
cases that were run, so an empty one says nothing. main is Megatron-LM's main branch of 2026-08-22
(0.20.0); slime is the commit that slime and vime pin, with slime's patch.
"""


def read(text: str) -> list[dict[str, Any]]:
    """Results as a JSON list, or as one JSON object a line."""
    stripped = text.strip()
    if stripped.startswith("["):
        listed: list[dict[str, Any]] = json.loads(stripped)
        return listed
    return [json.loads(line) for line in stripped.splitlines() if line.startswith("{")]


def page(results: list[dict[str, Any]]) -> str:
    """The page's text: optimizers down, releases across, 'exact of run' in each cell."""
    if not results:
        return f"{HEAD}\nNo results are committed yet.\n\n{TOGETHER}"
    run: Counter[tuple[str, str]] = Counter()
    good: Counter[tuple[str, str]] = Counter()
    failures = []
    for result in results:
        case = Case.parse(result["case"])
        key = (_row(case), Path(case.megatron).name)
        run[key] += 1
        if result["exact"] and result["sound"]:
            good[key] += 1
        else:
            failures.append(f"- `{result['case']}`: {_why(result)}")
    releases = sorted({release for _, release in run}, key=_version)
    lines = [HEAD, "| optimizer, format | " + " | ".join(releases) + " |"]
    lines.append("|---|" + "---|" * len(releases))
    for row in sorted({row for row, _ in run}):
        cells = [
            f"{good[row, release]} of {run[row, release]}" if run[row, release] else ""
            for release in releases
        ]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    lines += ["", f"{sum(good.values())} of {sum(run.values())} cases are exact."]
    if failures:
        lines += ["", "## Not exact", "", *sorted(failures)]
    return "\n".join([*lines, "", TOGETHER])


def _row(case: Case) -> str:
    backend = case.backend
    words = [
        backend.optimizer,
        *(["Apex"] if backend.apex else []),
        *(["PAO"] if backend.pao and backend.optimizer != "torch" else []),
    ]
    if backend.optimizer == "hybrid":
        words.append(f"f={backend.offload_fraction:g}")
    return f"{' '.join(words)}, {case.sharding or 'no type given'}"


def _why(result: dict[str, Any]) -> str:
    if result.get("error"):
        return str(result["error"]).splitlines()[0].replace("|", "\\|")
    return "not exact" if not result["exact"] else "exact, but a state holds more than it has"


def _version(release: str) -> tuple[bool, tuple[int, ...], str]:
    """Releases by their numbers, then source trees by name."""
    numbers = tuple(int(part) for part in release.split(".") if part.isdigit())
    return not numbers, numbers, release


if __name__ == "__main__":
    PAGE.write_text(page(read(Path(sys.argv[1]).read_text()) if len(sys.argv) > 1 else []))

"""What install() did, as data and as a table."""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass
from typing import Any

NOT_FOUND = "megatron-core not found"


@dataclass(frozen=True)
class Row:
    """One target of one fix."""

    fix: str
    faults: tuple[str, ...]
    target: str
    verdict: str
    """needed | fixed upstream | not understood | withheld | absent | not imported yet | skipped"""
    applied: bool
    hits: int
    """How often the fix was reached, summed over all targets of the fix."""
    reason: str = ""
    laid_over: str = ""
    """What somebody put over our patch after install(), which may undo the fix; '' for nothing."""


@dataclass(frozen=True)
class Report:
    """The state of an installation."""

    installed: bool
    version: str
    megatron: str
    rows: tuple[Row, ...]
    counters: dict[str, int]
    """Facts counted while running, such as parameters that fell back to a gather."""

    @property
    def hits(self) -> dict[str, int]:
        """Fix id to the number of times it was reached."""
        return {row.fix: row.hits for row in self.rows}

    @property
    def found(self) -> bool:
        """Whether there is a megatron-core to patch."""
        return self.megatron != NOT_FOUND

    def summary(self) -> str:
        """One line: `vime_optim 0.2.0: 22 fixes on megatron-core 0.19.2`."""
        fixes = self._by_fix()
        skipped = [name for name, rows in fixes.items() if rows[0].verdict == "skipped"]
        idle = {name for name, rows in fixes.items() if all(r.verdict in _IDLE for r in rows)}
        count = len(fixes) - len(idle)
        text = f"vime_optim {self.version}: {count} fix{'es' * (count != 1)} on"
        text += f" {self.megatron.split(' (')[0]}"
        return text + (f" (skipped: {', '.join(skipped)})" if skipped else "")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        state = "installed" if self.installed else "not installed"
        table = Table(title=f"vime_optim {self.version}, {state}: {self.megatron}", width=80)
        longest = max(map(len, self._by_fix()), default=0)
        table.add_column("fix", no_wrap=True, min_width=longest)
        table.add_column("faults", ratio=1, min_width=10)
        table.add_column("targets", ratio=1, min_width=12)
        table.add_column("hits", justify="right", no_wrap=True, min_width=4)
        notes = []
        for rows in self._by_fix().values():
            first = rows[0]
            table.add_row(first.fix, " ".join(first.faults), _summary(rows), str(first.hits))
            notes += [
                f"{row.target.removeprefix('megatron.')}: {row.verdict}"
                + (f" ({row.reason})" if row.reason else "")
                for row in rows
                if not row.applied and row.verdict not in _PLAIN
            ]
            notes += [
                f"{row.target.removeprefix('megatron.')}: patched over by {row.laid_over}"
                for row in rows
                if row.laid_over
            ]
        out = io.StringIO()
        console = Console(file=out, width=80, highlight=False, color_system=None)
        console.print(table)
        for note in notes:
            console.print(note, markup=False)
        for name, count in sorted(self.counters.items()):
            console.print(f"{name}: {count}", markup=False)
        return out.getvalue().rstrip()

    def __repr__(self) -> str:
        state = "installed" if self.installed else "not installed"
        return f"<{self.summary()}, {state}; print() shows the table>"

    def _by_fix(self) -> dict[str, list[Row]]:
        grouped: dict[str, list[Row]] = {}
        for row in self.rows:
            grouped.setdefault(row.fix, []).append(row)
        return grouped


_IDLE = ("skipped", "fixed upstream", "absent", "not understood", "withheld")
"""Verdicts of a target that is left alone."""

_PLAIN = ("skipped", "not imported yet", "needed", "absent")
"""Verdicts that need no line of their own below the table."""


def _summary(rows: list[Row]) -> str:
    """'4 applied', or the parts that a fix's targets fall into."""
    counts: dict[str, int] = {}
    for row in rows:
        name = "applied" if row.applied else row.verdict
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{count} {name}" for name, count in counts.items())

"""What install() did, as data and as a table."""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One target of one fix."""

    fix: str
    faults: tuple[str, ...]
    target: str
    verdict: str
    """needed | fixed upstream | not understood | absent | not imported yet | skipped"""
    applied: bool
    hits: int
    """How often the fix was reached, summed over all targets of the fix."""
    reason: str = ""


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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        state = "installed" if self.installed else "not installed"
        table = Table(title=f"vime_optim {self.version}, {state}: {self.megatron}")
        table.add_column("fix")
        table.add_column("faults")
        table.add_column("target", overflow="fold")
        table.add_column("state")
        table.add_column("hits", justify="right")
        previous = ""
        for row in self.rows:
            new = row.fix != previous
            verdict = row.verdict if not row.applied else "applied"
            table.add_row(
                row.fix if new else "",
                " ".join(row.faults) if new else "",
                _short(row.target),
                f"{verdict}: {row.reason}" if row.reason else verdict,
                str(row.hits) if new else "",
            )
            previous = row.fix
        out = io.StringIO()
        console = Console(file=out, width=110, highlight=False, color_system=None)
        console.print(table)
        for name, count in sorted(self.counters.items()):
            console.print(f"{name}: {count}")
        return out.getvalue().rstrip()

    __repr__ = __str__


def _short(target: str) -> str:
    """Class.method, or module.function: what tells targets apart on a narrow terminal."""
    return ".".join(target.split(".")[-2:])

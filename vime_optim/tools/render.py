"""Reports as lines of text; names of tensors and files are never broken."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from typing import Any

from vime_optim.errors import printable
from vime_optim.files.manifest import Verification
from vime_optim.tools.diff import CANNOT_SAY, DIFFERENT, EQUAL, DiffReport, TensorDiff
from vime_optim.tools.inspect import InspectReport, TensorSummary
from vime_optim.tools.repair import RepairPlan

WIDTH = 80
_NARROWEST = 40
_LISTED = 20


def size_text(count: int) -> str:
    """Bytes in binary units: 1.5 GiB."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{count} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def width() -> int:
    """Columns to fill: COLUMNS, else those of the terminal, else 80."""
    if not os.environ.get("COLUMNS", "").isdigit() and not sys.stdout.isatty():
        return WIDTH
    return max(_NARROWEST, shutil.get_terminal_size((WIDTH, 24)).columns)


def _wrap(text: str, indent: str = "", first: str = "") -> list[str]:
    return textwrap.wrap(
        printable(text),
        width(),
        initial_indent=first or indent,
        subsequent_indent=indent,
        break_long_words=False,  # a name that is cut in two can be neither copied nor searched
        break_on_hyphens=False,
    ) or [first.rstrip()]


def _field(label: str, value: object) -> list[str]:
    return _wrap(str(value), " " * 18, f"{label:<18}")


def inspect_lines(report: InspectReport) -> list[str]:
    lines = _field("checkpoint", report.path)
    steps = ", ".join(map(str, report.optimizer_steps)) or "none recorded"
    lines += _field("iteration", "not recorded" if report.step is None else report.step)
    lines += _field("optimizer step", steps)
    lines += _field("sharding", report.sharding or "not recorded")
    lines += _field("written by", report.written_by or "unknown")
    lines += _field("optimizer", report.optimizer_backend or "not recorded")
    layout = ", ".join(f"{key} {value}" for key, value in report.layout.items())
    lines += _field("layout", layout.replace("_", " "))
    lines += _field("model", _summary(report.model))
    lines += _field("optimizer state", _summary(report.optimizer))
    lines += _field("objects", report.objects)
    total = sum(report.files.values())
    lines += _field("files", f"{len(report.files)}, {size_text(total)}")
    for name, size in _shortened(list(report.files.items())):
        lines += _wrap(f"{size_text(size):>12}  {name}", " " * 16, "  ") if name else ["  ..."]
    if report.tree:
        lines += ["", "tensors"]
        for item in report.tree:
            shape = "x".join(map(str, item["shape"])) or "scalar"
            facts = f"{item['dtype']} {shape}, {size_text(item['bytes'])}"
            lines += _wrap(item["key"], "    ", "  ")
            lines += [f"      {facts}, {item['chunks']} chunks"]
    lines.append("")
    for finding in report.findings:
        lines += _wrap(f"{finding.severity.upper()} {finding.id}: {finding.what}", "  ")
        lines += _wrap(f"at {finding.where}", "      ", "    ")
        lines += _wrap(finding.todo, "      ", "    ")
    if not report.findings:
        lines.append("no faults found")
    return lines


def _summary(summary: TensorSummary) -> str:
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in sorted(summary.dtypes.items()))
    return f"{summary.count} tensors, {size_text(summary.size_bytes)} ({dtypes or 'none'})"


def _shortened(items: list[tuple[str, int]]) -> list[tuple[str, int]]:
    return items if len(items) <= _LISTED else [*items[:_LISTED], ("", 0)]


def diff_lines(report: DiffReport) -> list[str]:
    lines = _field("a", report.a) + _field("b", report.b)
    done = f"{report.compared} tensors, {size_text(report.compared_bytes)} a side"
    lines += _field("compared", done)
    for found in report.tensors[:_LISTED]:
        lines += _wrap(found.name, "    ", "  ")
        lines += _wrap(_difference(found), "      ")
    if len(report.tensors) > _LISTED:
        lines.append(f"  ... and {len(report.tensors) - _LISTED} more tensors (all with --json)")
    for label, names in (("only in a", report.only_in_a), ("only in b", report.only_in_b)):
        lines += [
            part for name in names[:_LISTED] for part in _wrap(name, " " * 14, f"  {label:<12}")
        ]
        if len(names) > _LISTED:
            lines.append(f"  {label:<12}... and {len(names) - _LISTED} more")
    for scalar in report.scalars[:_LISTED]:
        lines += _wrap(f"{scalar['name']}: {scalar['a']} against {scalar['b']}", "    ", "  ")
    for reason in report.cannot_say:
        lines += _wrap(reason, "  ")
    words = {
        EQUAL: "equal in every bit",
        DIFFERENT: "different: " + ", ".join(_counts(report)),
        CANNOT_SAY: "cannot say",
    }
    return [*lines, words[report.verdict]]


def _counts(report: DiffReport) -> list[str]:
    """What differs, and what is on one side alone."""
    counted = (
        ("tensors", report.tensors),
        ("scalars", report.scalars),
        ("only in a", report.only_in_a),
        ("only in b", report.only_in_b),
    )
    return [f"{len(found)} {name}" for name, found in counted if found]


def _difference(found: TensorDiff) -> str:
    if found.max_abs_diff is None and found.what.startswith("shape"):
        return found.what
    text = f"{found.differing_elem} of {found.numel} elements"
    if found.values_equal:
        return f"{found.what}; every value is equal"
    if found.max_abs_diff is not None:
        text += f", at most {found.max_abs_diff:.6g} apart"
    return text if found.what == "values" else f"{found.what}; {text}"


def check_lines(outcome: Verification) -> list[str]:
    """What `vime-optim check` prints."""
    lines = []
    for problem in outcome.problems:
        lines += _wrap(str(problem), first="wrong  ")
    for name in outcome.uncovered:
        lines += _wrap(f"{name}: the manifest does not name it", first="note   ")
    read = f", {size_text(outcome.bytes_read)} read" if outcome.bytes_read else ""
    verdict = "all as they were written" if outcome.ok else f"{len(outcome.problems)} problems"
    return [*lines, f"{outcome.files} files{read}: {verdict}"]


def repair_lines(plan: RepairPlan) -> list[str]:
    lines = _wrap("would do:" if plan.dry_run else "done:")
    for change in plan.changes or ["nothing to mend; the new directory holds the same"]:
        lines += _wrap(change, "    ", "  - ")
    for name, how in sorted(plan.files.items()):
        lines += _wrap(f"{how:<10} {name}", " " * 13, "  ")
    if not plan.dry_run:
        lines += _wrap(f"written to {plan.target}")
    return lines


def written_lines(report: dict[str, Any]) -> list[str]:
    """For export and import."""
    lines = _field("from", report["source"]) + _field("to", report["target"])
    lines += _field("format", report["format"])
    lines += _field("tensors", f"{report['tensors']}, {size_text(report['bytes'])}")
    if "shards" in report:
        resumed = f", {report['resumed']} of an earlier run" if report["resumed"] else ""
        lines += _field("shards", f"{report['shards']}{resumed}")
    for note in report.get("notes", []):
        lines += _wrap(note, "  ")
    return lines

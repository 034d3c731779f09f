"""A table and a plot of planning for many ranks, from results of `benchmarks.scale --json`.

python -m benchmarks.scale_report RESULT.json ... [--json ALL.json] [--plot docs/img/scale.png]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

SERIES = (
    ("stock, first save", "#aa3377", lambda a: a["stock"]["rank0"]["seconds"]),
    ("vime_optim, first save", "#4477aa", lambda a: a["ours"]["rank0"]["seconds"]),
    ("vime_optim, later save", "#66ccee", lambda a: a["ours"]["rank0"]["later_seconds"]),
)


def total_s(seconds: dict[str, float], part: str = "") -> float:
    return sum(value for name, value in seconds.items() if name.startswith(part))


def rows(answers: list[dict[str, Any]]) -> list[str]:
    """The lines of a Markdown table; "~" where a part of stock's was extrapolated."""
    lines = [
        "| job, ranks, keys | chunks | rank 0, first save (s) | later save (s) | peak (MB) |"
        " gathered a rank (bytes) | another rank plans a save (s) | a load (s) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for answer in answers:
        for who in ("stock", "ours"):
            rank0, other = answer[who]["rank0"], answer[who]["other"]["seconds"]
            about = "~" if rank0["extrapolated"] else ""
            later = total_s(rank0["later_seconds"])
            sent = sum(rank0[f"{what}_bytes_a_rank"] for what in ("plan", "shard", "result"))
            lines.append(
                f"| {answer['job']}, {answer['keys']}, {who} | {rank0['chunks']:,} |"
                f" {about}{total_s(rank0['seconds']):,.1f} | {f'{later:.2f}' if later else ''} |"
                f" {rank0['peak_bytes'] / 1e6:,.0f} | {sent:,.0f} |"
                f" {total_s(other, 'save'):.2f} | {total_s(other, 'load'):.2f} |"
            )
    return lines


def plot(answers: list[dict[str, Any]], path: Path) -> None:
    """Rank 0's seconds against ranks, stacked keys; light and dark."""
    from matplotlib.figure import Figure

    from benchmarks.plots import _darken

    stacked = sorted(
        (a for a in answers if a["keys"] == "stacked" and a["megatron"] == "0.16.1"),
        key=lambda answer: answer["ranks"],
    )
    figure = Figure(figsize=(8, 4.5))
    axis = figure.subplots()
    for label, color, seconds in SERIES:
        values = [total_s(seconds(answer)) for answer in stacked]
        axis.plot([a["ranks"] for a in stacked], values, marker="o", color=color, label=label)
        for answer, value in zip(stacked, values, strict=True):
            axis.annotate(
                f"{value:,.2g} s" if value < 10 else f"{value:,.0f} s",
                (answer["ranks"], value),
                textcoords="offset points",
                xytext=(0, -14 if "later" in label else 7),
                ha="center",
                fontsize=9,
            )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks([a["ranks"] for a in stacked], [f"{a['ranks']:,}\n{a['job']}" for a in stacked])
    axis.set_xlabel("ranks")
    axis.set_ylabel("processor seconds of rank 0")
    axis.margins(x=0.08, y=0.15)
    axis.legend(fontsize=9)
    figure.suptitle("planning of a save, stacked keys", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    _darken(figure)
    legend = axis.get_legend()
    for lines in (axis.lines, legend.get_lines() if legend else ()):
        for line, (_, color, _) in zip(lines, SERIES, strict=True):
            line.set_color(color)
    figure.savefig(path.with_name(f"{path.stem}_dark.png"), dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--json", type=Path, help="file for all results together")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    answers = [answer for path in args.results for answer in json.loads(path.read_text())]
    print("\n".join(rows(answers)))
    if args.json:
        args.json.write_text(json.dumps(answers, indent=1) + "\n")
    if args.plot:
        plot(answers, args.plot)


if __name__ == "__main__":
    main()

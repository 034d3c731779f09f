"""Plots of a result: save and load by phase, memory, and the parts of every phase."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.parts import PARTS
from benchmarks.report import (
    DP,
    FULLY,
    LOAD_PHASES,
    OURS,
    SAVE_PHASES,
    absence,
    best_rate,
    median,
    part_seconds,
    phase_values,
    seconds,
    slowest_s,
    turns_of,
)

LABELS = {
    FULLY: "stock\nfully_reshardable",
    DP: "stock\ndp_reshardable",
    OURS: "vime_optim\nfully_reshardable",
}
PHASE_COLORS = ("#4477aa", "#ccbb44", "#66ccee")
#: By part, as in parts.PARTS, and "other".
PART_COLORS = (
    *("#aa3377", "#4477aa", "#999933", "#66ccee", "#228833"),
    *("#ccbb44", "#332288", "#ee8866", "#117733", "#bbbbbb"),
)


def plot(result: dict[str, Any], entry: dict[str, Any], path: Path) -> None:
    """Save and load time by phase, and memory, for the three variants."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4))
    axes = figure.subplots(1, 3)
    for axis, part, phases in ((axes[0], "save", SAVE_PHASES), (axes[1], "load", LOAD_PHASES)):
        _plot_seconds(axis, entry, part, phases)
        floor = _floor_s(result, entry, part)
        if floor is not None:
            axis.axhline(floor, color="black", linestyle="--", linewidth=1, label="raw I/O")
        axis.legend(fontsize=8)
    _plot_memory(axes[2], entry)
    for axis in axes:
        axis.tick_params(axis="x", labelsize=8)
        axis.margins(y=0.12)
    _finish(figure, result, entry, path)


def _plot_seconds(axis: Any, entry: dict[str, Any], part: str, phases: tuple[str, ...]) -> None:
    bottom = [0.0] * len(LABELS)
    for phase, color in zip(phases, PHASE_COLORS, strict=False):
        heights = [
            median([slowest_s(turn, (phase,)) for turn in turns_of(entry, variant, part)]) or 0.0
            for variant in LABELS
        ]
        axis.bar(list(LABELS.values()), heights, bottom=bottom, label=phase, color=color)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    for place, variant in enumerate(LABELS):
        values = seconds(entry, variant, part)
        text = absence(entry, variant, part)
        if values:
            turns = "once" if len(values) == 1 else f"{len(values)} turns"
            text = f"{median(values):.2f} s\n({turns})"
        axis.annotate(text, (place, bottom[place]), ha="center", va="bottom", fontsize=8)
    axis.set_title(f"{part}, seconds (median of the turns)", fontsize=10)


def _plot_memory(axis: Any, entry: dict[str, Any]) -> None:
    own = max(entry["own_bytes"])
    for place, variant in enumerate(LABELS):
        if not turns_of(entry, variant, "save"):
            text = absence(entry, variant, "save")
            axis.annotate(text, (place, 0), ha="center", va="bottom", fontsize=8)
            continue
        labels = (None, None) if axis.patches else ("save", "load")
        for offset, part, phases, color, label in (
            (-0.2, "save", SAVE_PHASES, "#aa3377", labels[0]),
            (0.2, "load", LOAD_PHASES, "#228833", labels[1]),
        ):
            value = median(phase_values(entry, variant, part, phases, "host_extra_bytes"))
            height = (value or 0.0) / own
            text = absence(entry, variant, part) if value is None else f"{height:.2f}"
            axis.bar(place + offset, height, 0.4, color=color, label=label)
            axis.annotate(text, (place + offset, height), ha="center", va="bottom", fontsize=8)
    axis.set_xticks(range(len(LABELS)), list(LABELS.values()))
    axis.set_xlim(-0.6, len(LABELS) - 0.4)
    axis.set_title("extra host memory / own state", fontsize=10)
    if axis.patches:
        axis.legend(fontsize=8)


def plot_parts(result: dict[str, Any], entry: dict[str, Any], path: Path) -> None:
    """The parts of save and load as stacked horizontal bars; nothing for results without parts."""
    found = {variant: part_seconds(entry, variant) for variant in LABELS}
    if not any(found.values()):
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.4))
    axes = figure.subplots(1, 2)
    names = (*PARTS, "other")
    used: dict[str, Any] = {}
    for axis, half, phases in ((axes[0], "save", SAVE_PHASES), (axes[1], "load", LOAD_PHASES)):
        for place, variant in enumerate(LABELS):
            left = 0.0
            for part, color in zip(names, PART_COLORS, strict=True):
                width = sum(found[variant].get((phase, part), 0.0) for phase in phases)
                if width:
                    bar = axis.barh(place, width, left=left, color=color)
                    used.setdefault(part, bar)
                    left += width
            total = median(seconds(entry, variant, half))
            text = absence(entry, variant, half) if total is None else f"{total:.2f} s"
            axis.annotate(f" {text}", (left, place), va="center", fontsize=8)
        axis.set_yticks(range(len(LABELS)), list(LABELS.values()), fontsize=8)
        axis.invert_yaxis()
        axis.margins(x=0.15)
        axis.set_title(f"{half} by part, seconds (medians)", fontsize=9)
    order = [part for part in names if part in used]
    figure.legend([used[part] for part in order], order, ncols=len(order), fontsize=8, loc=8)
    _finish(figure, result, entry, path, bottom=0.09)


def _finish(
    figure: Any,
    result: dict[str, Any],
    entry: dict[str, Any],
    path: Path,
    bottom: float = 0.0,
) -> None:
    count = entry["parameters"]
    size = f"{count / 1e9:.2f}B" if count > 1e8 else f"{count / 1e6:.1f}M"
    figure.suptitle(
        f"{size} parameters, {entry['backend']}, "
        f"{result['ranks']} ranks, {result['hardware']['device']}",
        fontsize=10,
    )
    figure.tight_layout(rect=(0, bottom, 1, 1))
    figure.savefig(path, dpi=110)
    _darken(figure)
    figure.savefig(path.with_name(f"{path.stem}_dark.png"), dpi=110)


def _darken(figure: Any) -> None:
    """The same figure for a dark page: light ink on the ground of the documentation's theme."""
    ground, ink = "#1e2129", "#d7d9e0"
    figure.patch.set_facecolor(ground)
    texts = [figure._suptitle, *figure.texts]
    for axis in figure.axes:
        axis.set_facecolor(ground)
        axis.tick_params(colors=ink)
        texts += [axis.title, axis.xaxis.label, axis.yaxis.label, *axis.texts]
        for spine in axis.spines.values():
            spine.set_color(ink)
        for line in axis.lines:
            line.set_color(ink)
        legend = axis.get_legend()
        if legend is not None:
            legend.get_frame().set(facecolor=ground, edgecolor=ink)
            texts += legend.get_texts()
            for handle in legend.get_lines():
                handle.set_color(ink)
    for legend in figure.legends:
        legend.get_frame().set(facecolor=ground, edgecolor=ink)
        texts += legend.get_texts()
    for text in texts:
        text.set_color(ink)


def _floor_s(result: dict[str, Any], entry: dict[str, Any], part: str) -> float | None:
    """Bytes over the bandwidth of plain parallel writes or reads."""
    rate = best_rate(result, "write" if part == "save" else "read")
    stored = [max(turn["stored_bytes"]) for turn in turns_of(entry, OURS, "save")]
    if rate is None or not stored:
        return None
    total = stored[0] if part == "save" else sum(entry["own_bytes"]) + 2 * entry["model_bytes"]
    return float(total / rate)

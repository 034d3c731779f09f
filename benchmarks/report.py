"""Tables and plots of a result: the figures against their goals."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FULLY, DP, OURS = "stock fully_reshardable", "stock dp_reshardable", "vime_optim"
SAVE_PHASES = ("build", "write")
LOAD_PHASES = ("template", "read", "restore")
Turns = list[dict[str, Any]]


def write_all(result: dict[str, Any], path: Path, images: Path | None) -> None:
    """NAME.md beside NAME.json, and NAME_*.png in `images` or beside it; prints the table."""
    text = markdown(result)
    path.with_suffix(".md").write_text(text)
    print(text)
    folder = images or path.parent
    folder.mkdir(parents=True, exist_ok=True)
    for entry in result.get("configurations", []):
        if entry["turns"]:
            size = "" if entry["size"] in path.stem else f"_{entry['size']}"
            plot(result, entry, folder / f"{path.stem}{size}_{entry['backend']}.png")


def turns_of(entry: dict[str, Any], variant: str, part: str) -> Turns:
    """The counted turns of a variant whose `part` ("save" or "load") went through."""
    return [
        turn[part]
        for turn in entry["turns"]
        if turn["variant"] == variant
        and turn["round"] != "warm-up"
        and part in turn
        and "error" not in turn[part]
    ]


def slowest_s(turn: dict[str, Any], phases: Sequence[str]) -> float:
    """Seconds of the phases one after the other, each that of its slowest rank."""
    return float(sum(max(turn[phase]["seconds"]) for phase in phases))


def seconds(entry: dict[str, Any], variant: str, part: str) -> list[float]:
    phases = SAVE_PHASES if part == "save" else LOAD_PHASES
    return [slowest_s(turn, phases) for turn in turns_of(entry, variant, part)]


def phase_values(
    entry: dict[str, Any],
    variant: str,
    part: str,
    phases: Sequence[str],
    quantity: str,
    combine: Callable[[list[float]], float] = max,
) -> list[float]:
    """Per turn, the combined quantity of the worst rank over some phases."""
    return [
        max(
            combine([turn[phase][quantity][rank] for phase in phases])
            for rank in range(len(turn[phases[0]][quantity]))
        )
        for turn in turns_of(entry, variant, part)
    ]


def best_rate(result: dict[str, Any], direction: str) -> float | None:
    """Bytes a second of the best number of files, median of its repeats."""
    rates = result.get("raw_bytes_per_s", {}).get(direction, {})
    return max((statistics.median(values) for values in rates.values()), default=None)


def median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def spread(values: list[float], unit: str = "s") -> str:
    """Median and range."""
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.2f} {unit} (once)"
    return f"{statistics.median(values):.2f} {unit} ({min(values):.2f} to {max(values):.2f})"


def figures(result: dict[str, Any], entry: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(figure, goal, measured) in the order of the table of goals."""
    own = max(entry["own_bytes"])

    def share(variant: str, part: str, phases: Sequence[str], quantity: str) -> str:
        value = median(phase_values(entry, variant, part, phases, quantity))
        return "-" if value is None else f"{value / own:.1%}"

    def ratio(part: str, over: str, under: str) -> str:
        a, b = median(seconds(entry, over, part)), median(seconds(entry, under, part))
        return "-" if a is None or b is None else f"{a / b:.2f}x"

    stored = median([max(turn["stored_bytes"]) for turn in turns_of(entry, OURS, "save")])
    write, save_s = best_rate(result, "write"), median(seconds(entry, OURS, "save"))
    throughput = "-"
    if stored and write and save_s:
        throughput = f"{stored / save_s / write:.0%} ({stored / save_s / 1e9:.2f} GB/s)"
    read = phase_values(entry, OURS, "load", ("read",), "read_bytes")
    wanted = own + entry["model_bytes"]
    held = [
        max(h / o for h, o in zip(turn["held_bytes"], turn["own_bytes"], strict=True))
        for turn in turns_of(entry, OURS, "load")
    ]
    sent = median(phase_values(entry, OURS, "save", ("build",), "sent_bytes"))
    build, load = ("build",), LOAD_PHASES
    host = "host_extra_bytes"
    return [
        (
            "extra host memory while building the state dict, of own state",
            "at most 2%",
            f"{share(OURS, 'save', build, host)} (stock {share(FULLY, 'save', build, host)})",
        ),
        ("bytes sent by collectives while building", "0", "-" if sent is None else f"{sent:.0f}"),
        ("save, against stock dp_reshardable", "at most 1.0x", ratio("save", OURS, DP)),
        (
            "save, stock fully_reshardable against ours",
            "at least 6x",
            ratio("save", FULLY, OURS),
        ),
        ("save throughput, against raw parallel writes", "at least 80%", throughput),
        (
            "load: bytes read per rank / its share (states and weights)",
            "at most 1.1",
            f"{max(read) / wanted:.2f}" if read else "-",
        ),
        (
            "load: extra host memory, of own state",
            "at most 5%",
            f"{share(OURS, 'load', load, host)} (stock {share(FULLY, 'load', load, host)})",
        ),
        (
            "load, stock fully_reshardable against ours",
            "at least 3x",
            ratio("load", FULLY, OURS),
        ),
        ("load, against stock dp_reshardable", "-", ratio("load", OURS, DP)),
        ("storage held after load / state", "1.0", f"{max(held):.2f}" if held else "-"),
    ]


def markdown(result: dict[str, Any]) -> str:
    """The whole report as Markdown."""
    versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items())
    hardware = result["hardware"]
    commit = result["commit"] if " " in result["commit"] else result["commit"][:12]
    lines = [
        f"Commit {commit}, {result['date']}; {versions}. {hardware['device']},"
        f" {result.get('ranks')} ranks; {hardware['processor']}, {hardware['cores']} cores;"
        f" {hardware['file_system']}.",
        "",
        *_raw_lines(result),
    ]
    lines += [f"{note}\n" for note in result.get("notes", [])]
    if "problem" in result:
        lines += [f"**Cut short: {result['problem']}.**", ""]
    for entry in result.get("configurations", []):
        lines += _entry_lines(result, entry)
    return "\n".join(lines) + "\n"


def _raw_lines(result: dict[str, Any]) -> list[str]:
    lines = []
    for direction in ("write", "read"):
        rates = result.get("raw_bytes_per_s", {}).get(direction, {})
        if rates:
            text = ", ".join(
                f"{statistics.median(v) / 1e9:.2f} ({files})" for files, v in rates.items()
            )
            lines.append(f"Raw parallel {direction}s, GB/s by files a rank: {text}.")
    copies = result.get("copy_bytes_per_s", {})
    if copies:
        text = ", ".join(f"{name} {rate / 1e9:.1f}" for name, rate in copies.items())
        lines.append(f"Copies, GB/s: {text}.")
    return [*lines, ""] if lines else []


def _entry_lines(result: dict[str, Any], entry: dict[str, Any]) -> list[str]:
    own = max(entry["own_bytes"])
    lines = [
        f"## {entry['size']} parameters, {entry['backend']}",
        "",
        f"{entry['parameters'] / 1e6:.0f}M parameters, {own / 1e9:.2f} GB of states a rank.",
        "",
        "| | goal | measured |",
        "|---|---|---|",
        *(f"| {name} | {goal} | {got} |" for name, goal, got in figures(result, entry)),
        "",
        "| | save | build | write | load | extra host, save | extra host, load |"
        " extra device, save | sent in build | held / own | exact |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *(_variant_line(entry, variant, own) for variant in (FULLY, DP, OURS)),
        "",
    ]
    errors = {
        f"{turn['variant']}, {part}: {turn[part]['error']}"
        for turn in entry["turns"]
        for part in ("save", "load")
        if "error" in turn.get(part, {})
    }
    lines += [f"- {text}" for text in sorted(errors)]
    lines += [f"- left out: {text}" for text in entry.get("left_out", [])]
    return [*lines, ""]


def _variant_line(entry: dict[str, Any], variant: str, own: int) -> str:
    def of_own(part: str, phases: Sequence[str], quantity: str) -> str:
        value = median(phase_values(entry, variant, part, phases, quantity))
        return "-" if value is None else f"{value / own:.1%}"

    saves, loads = turns_of(entry, variant, "save"), turns_of(entry, variant, "load")
    builds = [slowest_s(turn, ("build",)) for turn in saves]
    writes = [slowest_s(turn, ("write",)) for turn in saves]
    sent = median(phase_values(entry, variant, "save", ("build",), "sent_bytes"))
    held = [max(turn["held_bytes"]) / max(turn["own_bytes"]) for turn in loads]
    wrong = sum(sum(turn["wrong_states"]) for turn in loads)
    return (
        f"| {variant} | {spread(seconds(entry, variant, 'save'))} | {spread(builds)} |"
        f" {spread(writes)} | {spread(seconds(entry, variant, 'load'))} |"
        f" {of_own('save', SAVE_PHASES, 'host_extra_bytes')} |"
        f" {of_own('load', LOAD_PHASES, 'host_extra_bytes')} |"
        f" {of_own('save', SAVE_PHASES, 'device_extra_bytes')} |"
        f" {'-' if sent is None else f'{sent / 1e6:.1f} MB'} |"
        f" {f'{max(held):.2f}' if held else '-'} |"
        f" {'-' if not loads else 'yes' if not wrong else f'{wrong} states differ'} |"
    )


def plot(result: dict[str, Any], entry: dict[str, Any], path: Path) -> None:
    """Save and load time by phase, and memory, for the three variants."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    own = max(entry["own_bytes"])
    labels = ["stock\nfully_reshardable", "stock\ndp_reshardable", "vime_optim\nfully_reshardable"]
    figure, axes = plt.subplots(1, 3, figsize=(12, 4))
    for axis, part, phases in ((axes[0], "save", SAVE_PHASES), (axes[1], "load", LOAD_PHASES)):
        bottom = [0.0] * 3
        for phase, color in zip(phases, ("#4477aa", "#ccbb44", "#66ccee"), strict=False):
            heights = [
                median([slowest_s(turn, (phase,)) for turn in turns_of(entry, variant, part)])
                or 0.0
                for variant in (FULLY, DP, OURS)
            ]
            axis.bar(labels, heights, bottom=bottom, label=phase, color=color)
            bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
        for place, variant in enumerate((FULLY, DP, OURS)):
            values = seconds(entry, variant, part)
            failed = any("error" in t.get(part, {}) for t in entry["turns"])
            text = f"{statistics.median(values):.2f} s" if values else "fails" if failed else ""
            axis.annotate(text, (place, bottom[place]), ha="center", va="bottom")
        floor = _floor_s(result, entry, part)
        if floor is not None:
            axis.axhline(floor, color="black", linestyle="--", linewidth=1, label="raw I/O")
        axis.set_title(f"{part}, seconds (median)")
        axis.legend(fontsize=8)
    for place, variant in enumerate((FULLY, DP, OURS)):
        for offset, part, phases, color in (
            (-0.2, "save", SAVE_PHASES, "#aa3377"),
            (0.2, "load", LOAD_PHASES, "#228833"),
        ):
            values = phase_values(entry, variant, part, phases, "host_extra_bytes")
            height = (median(values) or 0.0) / own
            axes[2].bar(place + offset, height, 0.4, color=color, label=None if place else part)
            axes[2].annotate(f"{height:.2f}", (place + offset, height), ha="center", va="bottom")
    axes[2].set_xticks(range(3), labels)
    axes[2].set_title("extra host memory / own state")
    axes[2].legend(fontsize=8)
    for axis in axes:
        axis.tick_params(axis="x", labelsize=8)
        axis.margins(y=0.12)
    figure.suptitle(
        f"{entry['parameters'] / 1e9:.2f}B parameters, {entry['backend']}, "
        f"{result['ranks']} ranks, {result['hardware']['device']}",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _floor_s(result: dict[str, Any], entry: dict[str, Any], part: str) -> float | None:
    """Bytes over the bandwidth of plain parallel writes or reads."""
    rate = best_rate(result, "write" if part == "save" else "read")
    stored = [max(turn["stored_bytes"]) for turn in turns_of(entry, OURS, "save")]
    if rate is None or not stored:
        return None
    total = stored[0] if part == "save" else sum(entry["own_bytes"]) + 2 * entry["model_bytes"]
    return float(total / rate)

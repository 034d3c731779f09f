"""The tables of a result: figures against their goals, the ways of saving, and their parts."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import plots
from benchmarks.parts import PARTS
from benchmarks.report import (
    DP,
    FULLY,
    LOAD_PHASES,
    OURS,
    SAVE_PHASES,
    absence,
    best_rate,
    host_peak_bytes,
    median,
    paired,
    part_seconds,
    phase_values,
    seconds,
    slowest_s,
    spread,
    turns_of,
)

#: What the parts are, and what cannot be told apart.
NOTES = (
    "Parts, each without what parts within it take: gather, stock's collectives over optimizer"
    " state; plan, local and global planning with its collectives, checks before a load, reading of"
    " metadata; garbage, gc.collect(); staging, copies of host views (stock) and of device tensors"
    " before the write; files, the write with fsync; commit, results, metadata, manifest; read,"
    " files to tensors, copies to the device included, as both readers copy while they read;"
    " weights and state, taking what was loaded; other, barriers and what is in no part. Waiting"
    " for slower ranks counts where it happens.",
    "",
    "A sync save of vime_optim may copy device tensors piece by piece within the write: staging is"
    " next to nothing then, and files includes these copies.",
)


def write_all(result: dict[str, Any], path: Path, images: Path | None) -> None:
    """NAME.md beside NAME.json, and NAME_*.png in `images` or beside it; prints the tables.

    Without matplotlib there are no plots; `--report` draws them elsewhere.
    """
    text = markdown(result)
    path.with_suffix(".md").write_text(text)
    print(text)
    if importlib.util.find_spec("matplotlib") is None:
        print("No plots: matplotlib is not installed.")
        return
    folder = images or path.parent
    folder.mkdir(parents=True, exist_ok=True)
    for entry in result.get("configurations", []):
        if entry["turns"]:
            size = "" if entry["size"] in path.stem else f"_{entry['size']}"
            image = folder / f"{path.stem}{size}_{entry['backend']}.png"
            plots.plot(result, entry, image)
            plots.plot_parts(result, entry, image.with_name(f"{image.stem}_parts.png"))


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
    if any(part_seconds(entry, OURS) for entry in result.get("configurations", [])):
        lines += [*NOTES, ""]
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
        "| | turns | save | build | write | load | extra host, save | extra host, load |"
        " extra device, save | sent in build | held / own | exact |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
        *(_variant_line(entry, variant, own) for variant in (FULLY, DP, OURS)),
        "",
        *_ratio_lines(entry),
        *_memory_lines(entry),
        *_parts_lines(entry),
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


def figures(result: dict[str, Any], entry: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(figure, goal, measured) in the order of the table of goals."""
    own = max(entry["own_bytes"])

    def share(variant: str, part: str, phases: Sequence[str], quantity: str) -> str:
        value = median(phase_values(entry, variant, part, phases, quantity))
        return absence(entry, variant, part) if value is None else f"{value / own:.1%}"

    def ratio(part: str, over: str, under: str) -> str:
        missing = {absence(entry, variant, part) for variant in (over, under)} - {"-"}
        if missing:
            return "not run" if "not run" in missing else "fails"
        counts = [len(seconds(entry, variant, part)) for variant in (over, under)]
        a, b = median(seconds(entry, over, part)), median(seconds(entry, under, part))
        return (
            "-" if a is None or b is None else f"{a / b:.2f}x ({counts[0]} and {counts[1]} turns)"
        )

    stored = median([max(turn["stored_bytes"]) for turn in turns_of(entry, OURS, "save")])
    write, save_s = best_rate(result, "write"), median(seconds(entry, OURS, "save"))
    throughput = "-"
    if stored and write and save_s:
        throughput = f"{stored / save_s / write:.0%} ({stored / save_s / 1e9:.2f} GB/s)"
    # Coded states are read while they are restored, and lie in the files as float32.
    read = phase_values(entry, OURS, "load", LOAD_PHASES, "read_bytes", sum)
    wanted = max(own, 12 * entry["parameters"] / result["ranks"]) + entry["model_bytes"]
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


def _variant_line(entry: dict[str, Any], variant: str, own: int) -> str:
    def of_own(part: str, phases: Sequence[str], quantity: str) -> str:
        value = median(phase_values(entry, variant, part, phases, quantity))
        return absence(entry, variant, part) if value is None else f"{value / own:.1%}"

    def times(part: str) -> str:
        values = seconds(entry, variant, part)
        return spread(values) if values else absence(entry, variant, part)

    saves, loads = turns_of(entry, variant, "save"), turns_of(entry, variant, "load")
    builds = [slowest_s(turn, ("build",)) for turn in saves]
    writes = [slowest_s(turn, ("write",)) for turn in saves]
    sent = median(phase_values(entry, variant, "save", ("build",), "sent_bytes"))
    held = [max(turn["held_bytes"]) / max(turn["own_bytes"]) for turn in loads]
    wrong = sum(sum(turn["wrong_states"]) for turn in loads)
    return (
        f"| {variant} | {len(saves)} | {times('save')} | {spread(builds)} |"
        f" {spread(writes)} | {times('load')} |"
        f" {of_own('save', SAVE_PHASES, 'host_extra_bytes')} |"
        f" {of_own('load', LOAD_PHASES, 'host_extra_bytes')} |"
        f" {of_own('save', SAVE_PHASES, 'device_extra_bytes')} |"
        f" {'-' if sent is None else f'{sent / 1e6:.1f} MB'} |"
        f" {f'{max(held):.2f}' if held else '-'} |"
        f" {'-' if not loads else 'yes' if not wrong else f'{wrong} states differ'} |"
    )


def _ratio_lines(entry: dict[str, Any]) -> list[str]:
    """ours / stock of each round where both have a turn: orders alternate, so drifts cancel."""
    lines = []
    for stock in (FULLY, DP):
        for part in ("save", "load"):
            values = paired(entry, part, OURS, stock)
            if values:
                lines.append(f"| {part} | {stock} | {len(values)} | {spread(values, 'x', 3)} |")
    if not lines:
        return []
    head = ["| vime_optim / stock in the same round | | pairs | ratio |", "|---|---|---|---|"]
    return [*head, *lines, ""]


def _memory_lines(entry: dict[str, Any]) -> list[str]:
    texts = []
    for variant, predicted in entry.get("predicted_host_bytes", {}).items():
        peak = host_peak_bytes(entry, variant)
        if peak is not None:
            texts.append(f"{variant} {peak / 1e9:.1f} ({predicted / 1e9:.1f} predicted)")
    if not texts:
        return []
    return [f"Host memory at the peak, all ranks and the files, GB: {', '.join(texts)}.", ""]


def _parts_lines(entry: dict[str, Any]) -> list[str]:
    found = {variant: part_seconds(entry, variant) for variant in (FULLY, DP, OURS)}
    if not any(found.values()):
        return []
    heads = {
        variant: f"{variant} ({_count(entry, variant, 'save')})" for variant in (FULLY, DP, OURS)
    }
    lines = [
        "Parts, seconds, of the rank that is slowest in the phase; medians (of two turns: means):",
        "",
        f"| phase | part | {' | '.join(heads.values())} |",
        "|---|---|---|---|---|",
    ]
    for phase in (*SAVE_PHASES, *LOAD_PHASES):
        for part in (*PARTS, "other"):
            row = [found[variant].get((phase, part)) for variant in (FULLY, DP, OURS)]
            if any(value is not None for value in row):
                cells = " | ".join("-" if value is None else f"{value:.3f}" for value in row)
                lines.append(f"| {phase} | {part} | {cells} |")
    return [*lines, ""]


def _count(entry: dict[str, Any], variant: str, part: str) -> str:
    count = len(turns_of(entry, variant, part))
    return absence(entry, variant, part) if not count else f"{count} turn{'s'[: count > 1]}"

"""What the tables and plots of a result are made of: turns, seconds, memory, ratios, parts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.parts import PARTS

FULLY, DP, OURS = "stock fully_reshardable", "stock dp_reshardable", "vime_optim"
SAVE_PHASES = ("build", "write")
LOAD_PHASES = ("template", "read", "restore")
Turns = list[dict[str, Any]]


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


def spread(values: list[float], unit: str = " s", digits: int = 2) -> str:
    """Median and range of three and more, else what there is."""
    if not values:
        return "-"
    texts = [f"{value:.{digits}f}" for value in values]
    if len(values) == 1:
        return f"{texts[0]}{unit} (once)"
    if len(values) == 2:
        return f"{texts[0]} and {texts[1]}{unit}"
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return f"{statistics.median(values):.{digits}f}{unit} ({low} to {high})"


def absence(entry: dict[str, Any], variant: str, part: str) -> str:
    """Why a variant has no figures: "not run", "fails", or "-" where it has or should have some."""
    turns = [turn for turn in entry["turns"] if turn["variant"] == variant]
    if any("error" in turn.get(half, {}) for turn in turns for half in ("save", part)):
        return "fails"
    return "-" if turns_of(entry, variant, part) else "not run"


def paired(entry: dict[str, Any], part: str, over: str, under: str) -> list[float]:
    """Ratios of the seconds of two variants in the same round, where both went through."""
    phases = SAVE_PHASES if part == "save" else LOAD_PHASES
    by_round: dict[str, dict[str, float]] = {}
    for turn in entry["turns"]:
        if turn["round"] != "warm-up" and part in turn and "error" not in turn[part]:
            value = slowest_s(turn[part], phases)
            by_round.setdefault(turn["round"], {})[turn["variant"]] = value
    return [
        found[over] / found[under] for found in by_round.values() if {over, under} <= found.keys()
    ]


def host_peak_bytes(entry: dict[str, Any], variant: str) -> int | None:
    """The largest sum of all ranks' peaks in a phase, and of the files that are there by then."""
    peaks = []
    for turn in entry["turns"]:
        if turn["variant"] != variant:
            continue
        stored = turn.get("save", {}).get("stored_bytes", [0])[0]
        for part, phases in (("save", SAVE_PHASES), ("load", LOAD_PHASES)):
            for phase in phases:
                found = turn.get(part, {}).get(phase, {}).get("host_peak_bytes")
                if found:
                    peaks.append(sum(found) + (0 if phase == "build" else stored))
    return max(peaks, default=None)


def part_seconds(entry: dict[str, Any], variant: str) -> dict[tuple[str, str], float]:
    """{(phase, part): seconds}: median over the turns of the rank that was slowest in the phase.

    "other" is what no part covers: barriers, and code that is not timed.
    """
    values: dict[tuple[str, str], list[float]] = {}
    for half, phases in (("save", SAVE_PHASES), ("load", LOAD_PHASES)):
        for phase in phases:
            turns = [turn[phase] for turn in turns_of(entry, variant, half)]
            measured = [_of_slowest(turn) for turn in turns if "parts" in turn]
            for part in (*PARTS, "other"):
                found = [parts.get(part, 0.0) for parts in measured]
                if any(found):
                    values[phase, part] = found
    return {key: statistics.median(found) for key, found in values.items()}


def _of_slowest(phase: dict[str, Any]) -> dict[str, float]:
    slowest_s = max(phase["seconds"])
    parts: dict[str, float] = phase["parts"][phase["seconds"].index(slowest_s)]
    return {**parts, "other": max(0.0, slowest_s - sum(parts.values()))}

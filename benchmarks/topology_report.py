"""The table of a result of topology8.py, as Markdown."""

from __future__ import annotations

from typing import Any

from benchmarks.report import DP, FULLY, LOAD_PHASES, OURS, SAVE_PHASES, slowest_s


def markdown(result: dict[str, Any]) -> str:
    """What was run, what was exact, and the three ways beside each other."""
    shape, hardware = result["shape"], result["hardware"]
    versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items())
    devices = f"{hardware['devices_used']} x " if hardware["devices_used"] else ""
    lines = [
        f"{result['topology']}; width {shape['width']}, {shape['layers']} layers,"
        f" {result.get('parameters', 0) / 1e6:.1f}M parameters. {devices}{hardware['device']},"
        f" {result['ranks']} ranks over {result['backend']}, {hardware['cores']} cores,"
        f" {hardware['file_system']}; {versions}; commit {result['commit'][:12]},"
        f" {result['date']}.",
        "",
        "| check | |",
        "|---|---|",
        *(
            f"| {check['check']} | {'exact' if check['exact'] else ', '.join(check['wrong'])} |"
            for check in result["checks"]
        ),
        "",
        *_launch_lines(result),
        *_measured_lines(result),
    ]
    lines += [f"- left out: {text}" for text in result["left_out"]]
    return "\n".join(lines) + "\n"


def _launch_lines(result: dict[str, Any]) -> list[str]:
    lines = ["| launch, phase | seconds | extra host, all ranks | extra device, a rank |"]
    lines += ["|---|---|---|---|"]
    for label, entry in result["launches"].items():
        outcome = f" failed: {entry['error'].splitlines()[0]}" if "error" in entry else ""
        lines.append(f"| **{label}** ({entry['topology']}){outcome} | {entry['seconds']:.0f} | | |")
        for name, phase in entry.get("phases", {}).items():
            lines.append(
                f"| {name} | {max(phase['seconds']):.2f} |"
                f" {_bytes(sum(phase['host_extra_bytes']))} |"
                f" {_bytes(max(phase['device_extra_bytes']))} |"
            )
    return [*lines, ""]


def _measured_lines(result: dict[str, Any]) -> list[str]:
    measured = result.get("measured")
    if measured is None:
        return []
    own = sum(measured["own_bytes"])
    lines = [
        f"Optimizer state: {_bytes(own)} over all ranks. Memory: host over all ranks; device, the"
        " worst rank.",
        "",
        "| turn | save | load | extra host, save | extra host, load | peak host |"
        " extra device | peak device | exact |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for variant in (FULLY, DP, OURS):
        for turn in measured["turns"]:
            if turn["variant"] == variant:
                lines.append(_turn_line(turn))
    return [*lines, ""]


def _turn_line(turn: dict[str, Any]) -> str:
    errors = [f"{p}: {turn[p]['error']}" for p in ("save", "load") if "error" in turn.get(p, {})]
    save, load = (None if _failed(turn, part) else turn[part] for part in ("save", "load"))
    phases = [save[name] for name in SAVE_PHASES] if save else []
    load_phases = [load[name] for name in LOAD_PHASES] if load else []
    every = [*phases, *load_phases]
    exact = "-" if load is None else "yes" if not sum(load["wrong_states"]) else "no"
    cells = [
        turn["variant"],
        f"{slowest_s(save, SAVE_PHASES):.2f} s" if save else "-",
        f"{slowest_s(load, LOAD_PHASES):.2f} s" if load else "-",
        _extra(phases),
        _extra(load_phases),
        _bytes(max((sum(phase["host_peak_bytes"]) for phase in every), default=0)),
        _bytes(max((max(phase["device_extra_bytes"]) for phase in every), default=0)),
        _bytes(max((max(phase["device_peak_bytes"]) for phase in every), default=0)),
        "; ".join(errors) or exact,
    ]
    return "| " + " | ".join(cells) + " |"


def _failed(turn: dict[str, Any], part: str) -> bool:
    return "error" in turn.get(part, {"error": "not reached"})


def _extra(phases: list[dict[str, Any]]) -> str:
    """The most that all ranks together held above what they had, in one phase."""
    return _bytes(max((sum(phase["host_extra_bytes"]) for phase in phases), default=0))


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count / 1e3:.0f} kB"

"""Training time that an async save costs: `python -m benchmarks.stall --megatron 0.19.2`.

Variants take turns in one run: stock's temporal and persistent callers, nvidia-resiliency-ext, and
vime_optim. Figures of the slower rank: seconds that the call blocks, that the updates after it take
longer, until the save is finalized; extra host and device memory, processes, /dev/shm; slowdown of
a loop of plain Python beside the writers, and the seconds that it lost until the end of the save.
`lost` is blocked call + longer updates. The first save of a process is told apart.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.run import ROOT, _wait, environment_of
from benchmarks.stall_rank import VARIANTS

_GIB = 1 << 30
COLUMNS = (
    ("first_lost_s", "first save lost, s"),
    ("lost_s", "later saves, s"),
    ("blocked_s", "call, s"),
    ("longer_updates_s", "updates, s"),
    ("finalized_s", "finalized after, s"),
    ("loop_slowdown", "Python slower, %"),
    ("loop_lost_s", "Python lost, s"),
    ("host_extra_bytes", "host, GiB"),
    ("device_extra_bytes", "device, GiB"),
    ("shared_bytes", "/dev/shm, GiB"),
    ("extra_processes", "processes"),
)


def targets_of(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    targets = [
        {"name": "/dev/shm", "folder": str(arguments.shm)},
        {"name": "disk", "folder": str(arguments.disk)},
        {
            "name": f"{arguments.rate_gbs:g} GB/s a rank",
            "folder": str(arguments.shm),
            "bytes_per_s": arguments.rate_gbs * 1e9,
        },
    ]
    return [t for t in targets if not arguments.target or t["name"].split()[0] in arguments.target]


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks; returns their result with what it was measured on."""
    from vime_optim.tools.megatron_source import resolve
    from vime_optim.verify.launch import kill_session, rank_environment

    out = Path(tempfile.mkdtemp(prefix="vime_optim_stall_"))
    nvrx = arguments.nvrx or _importable("nvidia_resiliency_ext")
    variants = [v for v in arguments.variant or VARIANTS if nvrx or v != VARIANTS[2]]
    options: dict[str, Any] = {
        "out": str(out),
        "folder": str(arguments.shm),
        "megatron": str(resolve(arguments.megatron)),
        "commit": arguments.commit,
        "device": arguments.device,
        "ranks": arguments.ranks,
        "threads": arguments.threads,
        "size": arguments.size,
        "backends": arguments.backend,
        "targets": targets_of(arguments),
        "variants": variants,
        "rounds": arguments.rounds,
        "interval_s": arguments.interval_s,
        "timeout_s": arguments.timeout_s,
        "json": str(arguments.json.absolute()) if arguments.json else None,
    }
    (out / "options.json").write_text(json.dumps(options))
    environment = rank_environment(Path(options["megatron"]), arguments.device)
    environment["OMP_NUM_THREADS"] = str(arguments.threads)
    environment["LOCAL_WORLD_SIZE"] = str(arguments.ranks)
    environment["VIME_OPTIM_BENCH_RATE_FILE"] = str(out / "rate")
    if arguments.nvrx:
        environment["PYTHONPATH"] += os.pathsep + str(arguments.nvrx)
    processes = []
    for rank in range(arguments.ranks):
        with (out / f"rank{rank}.log").open("wb") as log:
            command = [sys.executable, "-m", "benchmarks.stall_rank", str(out / "options.json")]
            processes.append(
                subprocess.Popen(
                    [*command, str(rank)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    cwd=ROOT,
                    start_new_session=True,
                )
            )
    try:
        problem = _wait(processes, time.monotonic() + arguments.timeout_s)
    finally:
        for process in processes:
            kill_session(process)
    if problem:
        print(problem, (out / "rank0.log").read_text()[-4000:], file=sys.stderr)
    path = out / "result.json"
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"turns": []}
    # What is published names no place of this machine.
    said = {key: value for key, value in options.items() if key not in ("out", "json")}
    said["megatron"] = Path(options["megatron"]).name
    result.update(options=said, problem=problem, environment=environment_of(options))
    shutil.rmtree(out, ignore_errors=True)
    return result


def _importable(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is not None


def together(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Several results as one, with every backend, target and variant of them."""
    whole = dict(results[0], turns=[turn for result in results for turn in result["turns"]])
    whole["options"] = dict(whole["options"])
    for name in ("backends", "targets", "variants"):
        values = [value for result in results for value in result["options"][name]]
        whole["options"][name] = [v for n, v in enumerate(values) if v not in values[:n]]
    return whole


def value_of(result: dict[str, Any], name: str, **where: str) -> float | None:
    """Median over the rounds, each of its slower (or larger) rank; of the first round for a name
    that begins with `first_`, of the later ones for others."""
    first = name.startswith("first_")
    name = name.removeprefix("first_")
    values = [
        max(rank[name] for rank in turn["ranks"])
        for turn in result["turns"]
        if (turn["round"] < 0) == first
        and all(turn[key] == wanted for key, wanted in where.items())
        and all(name in rank for rank in turn["ranks"])
    ]
    return statistics.median(values) if values else None


def table(result: dict[str, Any]) -> str:
    """The figures as Markdown, one table for each backend and target."""
    lines = []
    for backend in result["options"]["backends"]:
        for target in result["options"]["targets"]:
            lines += [f"\n**{backend}, {target['name']}**\n"]
            lines += ["| variant | " + " | ".join(head for _, head in COLUMNS) + " |"]
            lines += ["|---|" + "---|" * len(COLUMNS)]
            for variant in result["options"]["variants"]:
                place = {"backend": backend, "target": target["name"], "variant": variant}
                cells = [_cell(name, value_of(result, name, **place)) for name, _ in COLUMNS]
                lines.append(f"| {variant} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return "not run"
    if name.endswith("_bytes"):
        return f"{value / _GIB:.2f}"
    if name == "loop_slowdown":
        return f"{100 * value:.1f}"
    return f"{value:.0f}" if name == "extra_processes" else f"{value:.2f}"


def plot(result: dict[str, Any], path: Path) -> None:
    """Lost training time by variant, of the first save and of later ones; light and dark."""
    from matplotlib.figure import Figure

    from benchmarks.plots import _darken

    options = result["options"]
    targets, backends = options["targets"], options["backends"]
    figure = Figure(figsize=(4.4 * len(targets), 2.6 * len(backends)))
    axes = figure.subplots(len(backends), len(targets), squeeze=False)
    for row, backend in zip(axes, backends, strict=True):
        for axis, target in zip(row, targets, strict=True):
            for number, variant in enumerate(options["variants"]):
                place = {"backend": backend, "target": target["name"], "variant": variant}
                for name, color, shift in (
                    ("first_lost_s", "#bbbbbb", -0.2),
                    ("lost_s", "#aa3377", 0.2),
                ):
                    value = value_of(result, name, **place)
                    text = " not run" if value is None else f" {value:.2f} s"
                    axis.barh(number + shift, value or 0.0, 0.4, color=color)
                    axis.annotate(text, (value or 0.01, number + shift), va="center", fontsize=7)
            axis.set_xscale("log")
            axis.set_xlim(0.01, 300)
            axis.set_yticks(range(len(options["variants"])), options["variants"], fontsize=8)
            axis.invert_yaxis()
            axis.set_title(f"{backend}, {target['name']}", fontsize=9)
    title = "training time that an async save costs, s (grey: the first one of a process)"
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    _darken(figure)
    figure.savefig(path.with_name(f"{path.stem}_dark.png"), dpi=110)


def _parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megatron", default="0.19.2", help="release, or folder with megatron/")
    parser.add_argument("--nvrx", type=Path, help="folder with nvidia_resiliency_ext")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", default="45m", help="a name of benchmarks/state.py")
    parser.add_argument("--backend", action="append", help="hybrid, fused, ...; may be repeated")
    parser.add_argument("--variant", action="append", choices=VARIANTS)
    parser.add_argument("--target", action="append", help="/dev/shm, disk or 1; may be repeated")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads of a rank")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--interval-s", type=float, default=1.5)
    parser.add_argument("--rate-gbs", type=float, default=1.0)
    parser.add_argument("--shm", type=Path, default=Path("/dev/shm/vime_optim_stall"))
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()) / "stall_disk")
    parser.add_argument("--timeout-s", type=float, default=900.0)
    parser.add_argument("--commit", default="")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--report", type=Path, nargs="+", help="results to show again, as one")
    arguments = parser.parse_args(words)
    arguments.backend = arguments.backend or ["hybrid", "fused-rem"]
    return arguments


def main() -> None:
    arguments = _parse()
    if arguments.report:
        result = together([json.loads(path.read_text()) for path in arguments.report])
        if arguments.plot:
            plot(result, arguments.plot)
        print(table(result))
        return
    result = run(arguments)
    for folder in (arguments.shm, arguments.disk):
        shutil.rmtree(folder, ignore_errors=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.plot:
        plot(result, arguments.plot)
    print(table(result))
    sys.exit(bool(result["problem"]))


if __name__ == "__main__":
    main()

"""Megatron's own unit tests on stock and with install(): nothing may be newly red.

    python -m tests.upstream --tree MEGATRON_LM --tests FOLDER [--device sim|cuda] [--ranks N]
        [--beside N] [--together] [--json FILE] MODULE [MODULE ...]

FOLDER holds `tests/unit_tests` of the tree's release; MODULE is a path below it, such as
`dist_checkpointing/test_optimizer.py`. Every module runs in a launch of its own, twice; with
`--together` all share one launch, which saves imports. Exit status 1: a test passed on stock and
did not with install(), or none passed on stock.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vime_optim.verify.launch import kill_session

ROOT = Path(__file__).resolve().parents[2]
Outcomes = dict[str, str]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modules", nargs="+")
    parser.add_argument("--tree", type=Path, required=True)
    parser.add_argument("--tests", type=Path, required=True)
    parser.add_argument("--device", choices=("sim", "cuda"), default="sim")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--adam", choices=("torch", "te"), default="torch", help="on sim")
    parser.add_argument("-k", dest="select", help="only these tests, as pytest has it")
    parser.add_argument("--beside", type=int, default=1, help="launches at the same time")
    parser.add_argument("--together", action="store_true", help="all modules in one launch")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds a launch may take")
    parser.add_argument("--test-timeout", type=int, default=120, help="seconds a test may take")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    groups = [options.modules] if options.together else [[m] for m in options.modules]
    jobs = [(modules, install) for modules in groups for install in (False, True)]
    with ThreadPoolExecutor(options.beside) as pool:
        outcomes = list(pool.map(lambda job: run(options, *job), jobs))
    report = {}
    for at, modules in enumerate(groups):
        module = " ".join(modules)
        report[module] = compare(outcomes[2 * at], outcomes[2 * at + 1])
        print(module, json.dumps(report[module]["counts"]), flush=True)
        for name, text in report[module]["newly_red"].items():
            print(f"  NEWLY RED {name}: {text}")
        for name in report[module]["not_reached"]:
            print(f"  not reached with install(): {name}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
        if not report[module]["counts"].get("stock passed"):
            print("  nothing passed on stock: nothing was compared")
    return int(
        any(
            entry["newly_red"] or entry["not_reached"] or not entry["counts"].get("stock passed")
            for entry in report.values()
        )
    )


def run(options: argparse.Namespace, modules: list[str], install: bool) -> Outcomes:
    """One launch of all ranks. A test's outcome is that of the rank on which it went worst."""
    out = Path(tempfile.mkdtemp(prefix="upstream."))
    paths = [ROOT / "tests" / "upstream", options.tests, options.tree, ROOT]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("VIME_OPTIM_")},
        "UPSTREAM_DEVICE": options.device,
        "UPSTREAM_ADAM": options.adam,
        "UPSTREAM_INSTALL": str(int(install)),
        "UPSTREAM_OUT": str(out),
        "WORLD_SIZE": str(options.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": "1",
        # The suite's ranks meet in a folder below pytest's, which launches must not share.
        "PYTEST_DEBUG_TEMPROOT": str(out),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "PYTHONPATH": os.pathsep.join(
            [*map(str, map(Path.absolute, paths)), os.environ.get("PYTHONPATH", "")]
        ),
    }
    if options.device == "sim":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "pytest", "-p", "plugin", "-c", "/dev/null", "-q"]
    command += [f"--rootdir={options.tests.absolute()}", "-p", "no:cacheprovider"]
    command += [f"--timeout={options.test_timeout}", "--continue-on-collection-errors"]
    folder = options.tests.absolute() / "tests" / "unit_tests"
    command += [str(folder / module) for module in modules]
    command += ["-k", options.select] if options.select else []
    processes = []
    for rank in range(options.ranks):
        with (out / f"log{rank}").open("w") as log:
            processes.append(
                subprocess.Popen(
                    command,
                    cwd=options.tests,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    start_new_session=True,
                )
            )
    if not _wait(processes, time.monotonic() + options.timeout):
        print(f"  ended after {options.timeout:g} s, {out} has its logs: {modules}", flush=True)
    return _worst([_read(out / f"rank{rank}.json") for rank in range(options.ranks)])


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Whether all ended by themselves."""
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.2)
    have_ended = all(process.poll() is not None for process in processes)
    for process in processes:
        kill_session(process)
    return have_ended


def _read(path: Path) -> Outcomes:
    return json.loads(path.read_text()) if path.exists() else {}


def _worst(ranks: list[Outcomes]) -> Outcomes:
    names = {name for rank in ranks for name in rank}
    worst = {}
    for name in sorted(names):
        seen = [rank.get(name, "no outcome") for rank in ranks]
        bad = [text for text in seen if text.startswith("failed")] or [
            text for text in seen if text == "no outcome"
        ]
        worst[name] = bad[0] if bad else seen[0]
    return worst


def compare(stock: Outcomes, ours: Outcomes) -> dict[str, dict[str, str] | dict[str, int]]:
    """What passed on stock and failed with install(), or was not reached; and counts of both."""
    passed = [name for name, text in stock.items() if text == "passed"]
    counts = {
        f"{who} {kind}": number
        for who, outcomes in (("stock", stock), ("install", ours))
        for kind, number in Counter(t.split(":")[0] for t in outcomes.values()).items()
    }
    return {
        "counts": counts,
        "newly_red": {n: ours[n] for n in passed if ours.get(n, "").startswith("failed")},
        "not_reached": {n: "" for n in passed if ours.get(n, "no outcome") == "no outcome"},
        "newly_green": {
            n: text
            for n, text in stock.items()
            if text.startswith("failed") and ours.get(n) == "passed"
        },
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())

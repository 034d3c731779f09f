"""Starts the ranks of the benchmark and describes the machine."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def run_ranks(options: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Run all ranks; returns what rank 0 has measured, also when the run was cut short."""
    from vime_optim.verify.launch import kill_session, rank_environment

    out = Path(options["out"])
    out.mkdir(parents=True, exist_ok=True)
    (out / "rendezvous").unlink(missing_ok=True)
    (out / "options.json").write_text(json.dumps(options, indent=1))
    environment = rank_environment(Path(options["megatron"]), options["device"])
    environment.update(OMP_NUM_THREADS=str(options["threads"]), TORCHDYNAMO_DISABLE="1")
    environment["LOCAL_WORLD_SIZE"] = str(options["ranks"])
    processes = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks are ended too
    for rank in range(options["ranks"]):
        with (out / f"rank{rank}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    [
                        *(sys.executable, "-m", options.get("program", "benchmarks.rank")),
                        *(str(out / "options.json"), str(rank)),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    cwd=ROOT,
                    start_new_session=True,
                )
            )
    try:
        problem = _wait(processes, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            kill_session(process)
        shutil.rmtree(options["folder"], ignore_errors=True)
    path = out / "result.json"
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if problem:
        result["problem"] = problem
        for rank in range(options["ranks"]):
            print(f"--- rank {rank}, last lines", file=sys.stderr)
            print((out / f"rank{rank}.log").read_text()[-3000:], file=sys.stderr)
    return result


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> str:
    while True:
        codes = [process.poll() for process in processes]
        if all(code is not None for code in codes):
            return "" if not any(codes) else f"exit statuses {codes}"
        if any(codes):
            time.sleep(3.0)
            return f"exit statuses {[process.poll() for process in processes]}"
        if time.monotonic() > deadline:
            return "the time limit was reached"
        time.sleep(0.1)


def environment_of(options: dict[str, Any]) -> dict[str, Any]:
    """Commit, versions and hardware; no name of a machine."""
    import torch

    import vime_optim
    from vime_optim.simulate.megatron import SIMULATED_TE_VERSION

    cuda = options["device"] == "cuda"
    return {
        "commit": options["commit"] or _git("rev-parse", "HEAD"),
        "changed_files": len(_git("status", "--porcelain", "--untracked-files=no").splitlines()),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "versions": {
            "vime_optim": vime_optim.__version__,
            "megatron-core": _megatron_version(Path(options["megatron"])),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "transformer_engine": _te_version() if cuda else f"stand-in {SIMULATED_TE_VERSION}",
        },
        "hardware": {
            "device": torch.cuda.get_device_name(0) if cuda else "simulated on the CPU",
            "devices_used": options["ranks"] if cuda else 0,
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "file_system": _file_system(Path(options["folder"])),
        },
    }


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _megatron_version(tree: Path) -> str:
    text = (tree / "megatron/core/package_info.py").read_text()
    parts = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)$", text, re.MULTILINE))
    return ".".join(parts.get(name, "?") for name in ("MAJOR", "MINOR", "PATCH"))


def _te_version() -> str:
    try:
        import transformer_engine
    except ImportError:
        return "not there"
    return str(transformer_engine.__version__)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _file_system(folder: Path) -> str:
    """Type of the file system that holds `folder`, such as tmpfs or ext4."""
    best, kind = "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, found = line.split()[:3]
        inside = str(folder) == point or str(folder).startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, found
    return kind

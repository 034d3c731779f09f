"""The whole flow at its own topology: TP=2 with sequence parallelism, CP=2, DP=2 on 8 ranks.

    python -m benchmarks.topology8 --device cuda                 # 8 GPUs, Qwen3-4B shape
    python -m benchmarks.topology8 --device cuda --ranks 4       # 4 GPUs: DP=1
    python -m benchmarks.topology8 --device cuda --backend gloo --ranks-per-gpu 4 --layers 8
    python -m benchmarks.topology8 --width 160 --layers 4 --sequence 64      # simulated device

One launch after the other, each of fresh processes:

- save: a run without interruption, which saves at once and in the background on its way;
- resume: the same topology loads both, and must end where that run ended;
- load at TP=1 and at TP=4, from the same files;
- measure: stock fully_reshardable, stock dp_reshardable and vime_optim in turns on one state.

States are compared by fingerprints (fingerprint.py). What does not fit into --budget is left out,
and is named. Exit status 0: everything ran and was exact; 1: something differed or failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import topology_report
from benchmarks.fingerprint import differences
from benchmarks.report import DP, FULLY, OURS
from benchmarks.topology_model import Shape, Topology

#: The topologies that load, by number of ranks.
LOADS = {8: ["1x2", "4x2"], 4: ["1x1", "4x1"]}
#: No NVLink multicast, the same kernels in every run, nothing compiled, one host.
ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "TORCHDYNAMO_DISABLE": "1",
}


class Run:
    """The launches of one call; `result` is written after each of them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from vime_optim.tools.megatron_source import resolve

        self.arguments = arguments
        self.deadline = time.monotonic() + arguments.budget
        self.tree = resolve(arguments.megatron)
        self.saved = Topology.parse(arguments.save, arguments.ranks)
        self.shape = Shape(arguments.width, arguments.layers, arguments.sequence)
        self.folder = Path(tempfile.mkdtemp(prefix="vime-topology-", dir=arguments.folder))
        self.out = arguments.logs or Path(tempfile.mkdtemp(prefix="vime-topology-logs-"))
        self.result = self._head()
        self.launcher = self._open()

    def _head(self) -> dict[str, Any]:
        from benchmarks.run import environment_of

        arguments = self.arguments
        options = {
            "device": arguments.device,
            "commit": arguments.commit,
            "megatron": str(self.tree),
            "ranks": arguments.ranks // arguments.ranks_per_gpu,
            "folder": str(self.folder),
        }
        return {
            **environment_of(options),
            "ranks": arguments.ranks,
            "ranks_per_gpu": arguments.ranks_per_gpu,
            "backend": arguments.backend,
            "threads": arguments.threads,
            "async_mode": arguments.async_mode,
            "topology": str(self.saved),
            "shape": {
                **dataclasses.asdict(self.shape),
                "head_size": self.shape.head_size,
                "ffn": self.shape.ffn,
                "vocabulary": self.shape.vocabulary,
            },
            "launches": {},
            "checks": [],
            "left_out": [],
        }

    def _open(self) -> Any:
        from vime_optim.verify.launch import ProcessLauncher, open_launcher

        if self.arguments.device == "cpu":
            return open_launcher(self.tree)
        return ProcessLauncher(
            self.tree,
            "cuda",
            backend="gloo" if self.arguments.backend == "gloo" else None,
            ranks_per_device=self.arguments.ranks_per_gpu,
        )

    def launch(
        self, label: str, function: str, topology: Topology, **more: Any
    ) -> dict[str, Any] | None:
        """Rank 0's answer, or None after a failure or for want of time."""
        from vime_optim.errors import VimeOptimError

        left_s = self.deadline - time.monotonic()
        if left_s < self.arguments.least:
            self.result["left_out"].append(f"{label}: {left_s:.0f} s were left")
            return None
        payload = {
            "device": self.arguments.device,
            "shape": dataclasses.asdict(self.shape),
            "topology": dataclasses.asdict(topology),
            "saved": dataclasses.asdict(self.saved),
            "folder": str(self.folder),
            "out": str(self.out),
            "ranks": self.arguments.ranks,
            "threads": self.arguments.threads,
            "async_mode": self.arguments.async_mode,
            "staged": self.arguments.backend == "gloo",
            "budget_s": left_s - self.arguments.least,
            "prefault_bytes": int(self.arguments.prefault_gb * 1e9) // self.arguments.ranks,
            **more,
        }
        began = time.monotonic()
        entry: dict[str, Any] = {"topology": str(topology)}
        self.result["launches"][label] = entry
        print(f"== {label} ({topology})", flush=True)
        try:
            answers = self.launcher.run(
                f"benchmarks.topology_rank:{function}",
                world_size=self.arguments.ranks,
                payload=payload,
                out=self.out / label.replace(" ", "_"),
                timeout_s=left_s,
            )
        except VimeOptimError as error:
            entry["error"] = str(error)
            print(f"   {error}", flush=True)
            return None
        finally:
            entry["seconds"] = time.monotonic() - began
            self.write()
        if "phases" in answers[0]:
            entry["phases"] = by_rank([answer["phases"] for answer in answers])
        for name in ("losses", "build_s", "prefault_s", "hits", "parameters"):
            if name in answers[0]:
                entry[name] = answers[0][name]
        first: dict[str, Any] = answers[0]
        self.check(f"{label}: replicas agree", first.get("conflicts", []), "conflicts" in first)
        self.write()
        return first

    def check(self, name: str, wrong: list[str], ran: bool = True) -> None:
        if ran:
            self.result["checks"].append({"check": name, "exact": not wrong, "wrong": wrong[:5]})
            print(f"   {'exact' if not wrong else 'DIFFERS'}: {name}", flush=True)

    def write(self) -> None:
        path = self.arguments.json
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.result, indent=1) + "\n")

    def all(self) -> bool:
        """Every launch; whether everything ran and was exact."""
        try:
            saved = self.launch("save", "save", self.saved) if self.wants("save") else None
            if saved is not None:
                self.result["parameters"] = saved["parameters"]
                self.result["stored_bytes"] = sum(
                    path.stat().st_size for path in (self.folder / "sync").rglob("*")
                )
                self.loads(saved)
            shutil.rmtree(self.folder / "sync", ignore_errors=True)
            shutil.rmtree(self.folder / "async", ignore_errors=True)
            if self.wants("measure"):
                turns = [DP, OURS, FULLY] + [OURS, DP] * self.arguments.rounds
                answer = self.launch("measure", "measure", self.saved, turns=turns)
                partial = self.out / "result.json"
                if answer is None and partial.exists():
                    answer = json.loads(partial.read_text())
                if answer is not None:
                    self.result["measured"] = {k: answer[k] for k in ("turns", "own_bytes")}
        finally:
            self.launcher.close()
            shutil.rmtree(self.folder, ignore_errors=True)
            self.write()
        failed = [name for name, entry in self.result["launches"].items() if "error" in entry]
        wrong = [check for check in self.result["checks"] if not check["exact"]]
        return not failed and not wrong and not self.result["left_out"]

    def loads(self, saved: dict[str, Any]) -> None:
        names = ["sync", "async"]
        if self.wants("resume"):
            answer = self.launch("resume", "resume", self.saved, names=names)
            for name in names if answer else []:
                assert answer is not None
                wrong = differences(saved[name], answer[f"{name} loaded"], ("grad ",))
                self.check(f"resume: loaded from the {name} save", wrong)
                wrong = differences(saved["end"], answer[f"{name} end"], ())
                self.check(f"resume: continuous against split at the {name} save", wrong)
        for text in self.arguments.load if self.wants("load") else []:
            topology = Topology.parse(text, self.arguments.ranks)
            label = f"load at TP={topology.tp}"
            answer = self.launch(label, "resume", topology, names=names)
            for name in names if answer else []:
                assert answer is not None
                wrong = differences(saved[name], answer[f"{name} loaded"], ("grad ", "rng "))
                self.check(f"{label}: loaded from the {name} save", wrong)

    def wants(self, part: str) -> bool:
        return part in self.arguments.parts


def by_rank(answers: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """{phase: {quantity: [value by rank]}}."""
    return {
        phase: {key: [answer[phase][key] for answer in answers] for key in values}
        for phase, values in answers[0].items()
    }


def main(words: list[str] | None = None) -> None:
    arguments = _parse(words)
    if arguments.report is not None:
        print(topology_report.markdown(json.loads(arguments.report.read_text())))
        return
    os.environ.update(ENVIRONMENT, LOCAL_WORLD_SIZE=str(arguments.ranks))
    run = Run(arguments)
    good = run.all()
    print(topology_report.markdown(run.result))
    raise SystemExit(0 if good else 1)


def _parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.topology8",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cpu simulates a device")
    add("--backend", choices=("gloo", "nccl"), help="default: nccl on cuda, gloo on cpu")
    add("--ranks", type=int, default=8)
    add("--ranks-per-gpu", type=int, default=1, help="more than one needs --backend gloo")
    add("--megatron", default="0.19.2", help="a release, or a folder with megatron/")
    add("--width", type=int, default=2560, help="hidden size; the other sizes follow")
    add("--layers", type=int, default=36)
    add("--sequence", type=int, default=1024, help="tokens of a sample")
    add("--save", default="2x2", help="TPxCP of the run that saves; DP is the rest")
    add("--load", action="append", help="TPxCP of a run that loads; may be repeated")
    add("--async-mode", choices=("forked", "persistent"), help="persistent on cuda")
    add("--parts", nargs="+", default=["save", "resume", "load", "measure"])
    add("--rounds", type=int, default=1, help="further turns of vime_optim and dp_reshardable")
    add("--threads", type=int, default=0, help="of each rank")
    add("--prefault-gb", type=float, default=0.0, help="memory touched before all, in all ranks")
    add("--budget", type=float, default=570.0, help="seconds for everything")
    add("--least", type=float, default=20.0, help="seconds without which no launch is begun")
    add("--folder", type=Path, default=Path("/dev/shm"), help="where checkpoints are written")
    add("--logs", type=Path, help="keep the output of the ranks here")
    add("--json", type=Path, help="write the result here, after every launch")
    add("--commit", default="", help="commit, where there is no git")
    add("--report", type=Path, help="only print the table of this result")
    arguments = parser.parse_args(words)
    cuda = arguments.device == "cuda"
    arguments.backend = arguments.backend or ("nccl" if cuda else "gloo")
    arguments.async_mode = arguments.async_mode or ("persistent" if cuda else "forked")
    arguments.load = arguments.load or LOADS.get(arguments.ranks, [])
    cores = len(os.sched_getaffinity(0))
    arguments.threads = arguments.threads or max(1, cores // arguments.ranks if cuda else 1)
    if arguments.ranks_per_gpu > 1 and arguments.backend != "gloo":
        parser.error("several ranks on a GPU need --backend gloo")
    return arguments


if __name__ == "__main__":
    main()

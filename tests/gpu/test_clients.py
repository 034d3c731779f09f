"""Megatron's own main loop on GPUs: saved, resumed in fresh processes, every bit compared.

Losses, gradient norm, learning rates, parameters and optimizer state of every step of the resumed
run are those of the run that went on. Transformer Engine's layers and FusedAdam; two ranks, DP=2
unless a case says otherwise; where there is one GPU they share it. A pair of runs takes about a
minute, most of it imports, so a few run beside each other (VIME_OPTIM_GPU_PAIRS, 8 unless set).
VIME_OPTIM_GPU_INSTALL=no runs the cases on stock: what differs there is not ours.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import resident as gpu

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from clients import cases, client, trees

from vime_optim.verify.launch import kill_session

pytestmark = pytest.mark.gpu
OLD, NEW, MAIN = (f"megatron-lm-{name}" for name in ("0.16.1", "0.19.1", "main"))
ALL = (OLD, NEW, MAIN)
RUN_TIMEOUT_S = 200.0
PAIRS = int(os.environ.get("VIME_OPTIM_GPU_PAIRS", "8"))

#: Replaces what tests/clients says of the simulated device.
ON_GPUS = shlex.split("""
--transformer-impl transformer_engine --attention-backend unfused --distributed-backend
""")
TE_BF16 = (*cases.PAO, "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16")
TENSOR = shlex.split("--tensor-model-parallel-size 2 --sequence-parallel")
#: Tied embeddings of two stages drift apart with fractional offload, on stock too (docs/limits.md).
PIPELINE = shlex.split("--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights")
EXPERTS = shlex.split("""
--num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2 --disable-bias-linear
--moe-token-dispatcher-type alltoall
""")
FP8 = shlex.split("--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather")


@dataclass(frozen=True)
class Case:
    """Arguments of both runs; `fp32_masters`: FusedAdam keeps whole masters, not remainders."""

    name: str
    both: tuple[str, ...]
    trees: tuple[str, ...] = ALL
    fp32_masters: bool = False


CASES = (
    Case("whole", cases.WHOLE),
    Case("half", cases.HALF),
    Case("te-remainders", cases.PAO),
    Case("te-fp32", cases.PAO, fp32_masters=True),
    Case("te-bf16", TE_BF16),
    Case("te-fully", (*cases.PAO, "--dist-ckpt-optim-fully-reshardable")),
    Case("half-async", (*cases.HALF, *cases.MCORE)),
    Case("te-async", (*cases.PAO, *cases.MCORE)),
    Case("half-async-nvrx", (*cases.HALF, *cases.NVRX), trees=(NEW, MAIN)),
    Case("te-async-nvrx", (*cases.PAO, *cases.NVRX), trees=(NEW, MAIN)),
    Case("half-constant", (*cases.HALF, *cases.MCORE, *cases.CONSTANT)),
    Case("half-tp2", (*cases.HALF, *TENSOR)),
    Case("half-pp2", (*cases.HALF, *PIPELINE)),
    Case("half-ep2", (*cases.HALF, *EXPERTS)),
    Case("te-tp2", (*cases.PAO, *TENSOR)),
    Case("te-ep2", (*cases.PAO, *EXPERTS)),
    Case("te-fp8", (*cases.PLAIN, *FP8)),
    Case("muon", ("--optimizer", "muon"), trees=(NEW, MAIN)),
    Case("lion", ("--use-distributed-optimizer", "--optimizer", "lion"), trees=(NEW, MAIN)),
)


class Runs:
    """Every pair of runs, started once, some beside each other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(PAIRS)
        self._pairs: dict[tuple[str, str], Future[list[str]]] = {}

    def start(self, wanted: list[tuple[str, Case]]) -> None:
        for tree, case in wanted:
            key = tree, case.name
            if key not in self._pairs:
                self._pairs[key] = self._pool.submit(self._pair, tree, case)

    def differences(self, tree: str, case: Case) -> list[str]:
        self.start([(tree, case)])
        return self._pairs[tree, case.name].result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _pair(self, tree: str, case: Case) -> list[str]:
        out = self._folder / f"{tree}.{case.name}"
        out.mkdir(parents=True)
        whole = cases.Case(case.name, case.both)
        full = self._run(tree, case, whole, "full", out)
        (out / "saved" / "latest_checkpointed_iteration.txt").write_text(str(cases.SAVED_AT))
        resumed = self._run(tree, case, whole, "resume", out)
        return client.differences(full, resumed, cases.SAVED_AT + 1)

    def _run(self, tree: str, case: Case, whole: cases.Case, phase: str, out: Path) -> list[Any]:
        home = trees.find(tree)
        shared = gpu.ranks_per_device() > 1
        words = [*cases.TINY, *ON_GPUS, "gloo" if shared else "nccl"]
        words += ["--data-cache-path", str(out / "cache")]
        request = {
            "tree": str(home),
            "paths": [p for p in os.environ.get("VIME_OPTIM_GPU_PATHS", "").split(":") if p],
            "out": str(out),
            "phase": phase,
            "world_size": 2,
            "port": client.free_port(),
            "arguments": words + cases.arguments_of(whole, phase, out, home),
            "install": os.environ.get("VIME_OPTIM_GPU_INSTALL", "after"),
            "adam": "torch",
            "real_main": True,
            "callers": [],
            "fp32_masters": case.fp32_masters,
            "shared_device": shared,
        }
        path = out / f"{phase}.json"
        path.write_text(json.dumps(request))
        status = _launch(path, phase, out)
        return [client.read(out, phase, rank, status[rank]) for rank in range(2)]


def _launch(request: Path, phase: str, out: Path) -> list[int]:
    """Start two ranks and wait; everything that they started ends with them."""
    program = str(Path(__file__).with_name("client_rank.py"))
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("VIME_OPTIM_")},
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_ALGO": "Ring",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
    }
    processes = []
    for rank in range(2):
        with (out / f"{phase}.start{rank}.log").open("w") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, program, str(request), str(rank)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                )
            )
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if any(process.poll() for process in processes):
            deadline = min(deadline, time.monotonic() + gpu.GRACE_S)
        time.sleep(0.1)
    for process in processes:
        kill_session(process)
    return [process.returncode for process in processes]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    runs = Runs(tmp_path_factory.mktemp("clients"))
    yield runs
    runs.close()


def _wanted() -> list[tuple[str, Case]]:
    return [(tree, case) for tree in ALL for case in CASES if tree in case.trees]


@pytest.fixture(scope="module", autouse=True)
def _all_started(request: pytest.FixtureRequest, runs: Runs) -> None:
    if _reason():
        return
    asked = {item.name for item in request.session.items}
    runs.start([w for w in _wanted() if f"test_resumes_exactly[{w[0]}-{w[1].name}]" in asked])


def _reason(case: Case | None = None) -> str:
    """Why the cases, or this one, cannot run here, or nothing."""
    from importlib.util import find_spec

    from vime_optim.compat import transformer_engine_version

    if gpu.REHEARSE:
        return "the simulated device runs tests/clients"
    if reason := gpu.missing_devices(2):
        return reason
    if transformer_engine_version() is None:
        return "Transformer Engine is not installed"
    if case is not None and case.name in ("muon", "lion") and not find_spec("emerging_optimizers"):
        return "emerging-optimizers is not installed"
    if case is not None and "nvrx" in case.name and not find_spec("nvidia_resiliency_ext"):
        return "nvidia-resiliency-ext is not installed"
    return ""


@pytest.mark.parametrize(
    ("tree", "case"), [pytest.param(t, c, id=f"{t}-{c.name}") for t, c in _wanted()]
)
def test_resumes_exactly(tree: str, case: Case, runs: Runs) -> None:
    if reason := _reason(case):
        pytest.skip(reason)
    try:
        trees.find(tree)
    except trees.NoTree as missing:
        pytest.skip(str(missing))
    assert runs.differences(tree, case) == []

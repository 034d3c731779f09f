"""What each rank does in the launches of topology8.py; functions for vime_optim.verify.launch.

Each takes and returns plain data; results are the same on every rank unless they are measurements.
"""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import rawio
from benchmarks import topology_model as model
from benchmarks.fingerprint import fingerprint
from benchmarks.measure import Meter
from benchmarks.rank import VARIANTS, Rank, allow_optimizer_classes, choose_optimizer, gathered
from vime_optim.verify import checkpointing
from vime_optim.verify.model import Job

SEED = 1234
SYNC_STEP, ASYNC_STEP, LAST_STEP = 2, 3, 5
SYNC, ASYNC = "sync", "async"


class Side:
    """One launch's settings on this rank."""

    def __init__(self, payload: dict[str, Any], *, install: bool = True) -> None:
        self.simulated = payload["device"] == "cpu"
        self.shape = model.Shape(**payload["shape"])
        self.topology = model.Topology(**payload["topology"])
        self.saved = model.Topology(**payload["saved"])
        self.folder = Path(payload["folder"])
        self.async_mode = payload["async_mode"]
        self.timed: dict[str, Any] = {}
        torch.set_num_threads(payload["threads"])
        if payload["staged"]:
            from benchmarks.staging import stage_collectives

            stage_collectives()
        choose_optimizer(self.simulated)
        if install:
            import vime_optim

            vime_optim.install()

    def build(self, seed: int, shape: model.Shape | None = None) -> Job:
        began = time.perf_counter()
        shape = shape or self.shape
        job = model.build(shape, self.topology, self.saved, seed, self.simulated)
        self.timed.setdefault("build_s", time.perf_counter() - began)
        return job

    def clear(self) -> None:
        gc.collect()
        if not self.simulated:
            torch.cuda.empty_cache()
        torch.distributed.barrier()


def save(payload: dict[str, Any]) -> dict[str, Any]:
    """Train all steps in one go; on the way save once at once and once in the background."""
    side = Side(payload)
    side.timed["prefault_s"] = rawio.prefault(payload["prefault_bytes"])
    job = side.build(SEED)
    meter = Meter(simulated=side.simulated)
    answer: dict[str, Any] = {"parameters": parameters(job), "phases": {}, "conflicts": []}

    def note(name: str) -> None:
        answer[name], conflicts = fingerprint(job)
        answer["conflicts"] += conflicts

    def phase(name: str, work: Any) -> None:
        answer["phases"][name] = meter.phase(work)[1].to_dict()

    answer["losses"] = model.train(job, side.shape, SYNC_STEP)
    note(SYNC)
    phase("sync save", lambda: checkpointing.save(job, side.folder / SYNC, None))

    answer["losses"] += model.train(job, side.shape, ASYNC_STEP)
    note(ASYNC)
    queue = _async_queue(side.async_mode)
    phase(
        "async save, until it returns",
        lambda: checkpointing.save(job, side.folder / ASYNC, queue.schedule_async_request),
    )
    phase(
        "a step beside the writer",
        lambda: answer["losses"].extend(model.train(job, side.shape, ASYNC_STEP + 1)),
    )
    phase("waiting for the writer", lambda: queue.maybe_finalize_async_calls(blocking=True))
    queue.close()
    phase(
        "a step alone",
        lambda: answer["losses"].extend(model.train(job, side.shape, LAST_STEP)),
    )
    note("end")
    meter.close()
    return {**answer, **side.timed, "hits": _hits()}


def resume(payload: dict[str, Any]) -> dict[str, Any]:
    """Load each checkpoint into a new job with another seed, and train to the end.

    In another topology sums run in another order, so there only one step is trained.
    """
    side = Side(payload)
    meter = Meter(simulated=side.simulated)
    answer: dict[str, Any] = {"conflicts": [], "phases": {}, "losses": {}}
    for number, name in enumerate(payload["names"]):
        job = side.build(SEED + 77 + number)
        step = SYNC_STEP if name == SYNC else ASYNC_STEP
        answer["phases"][f"load {name}"] = meter.phase(
            lambda job=job, name=name, step=step: checkpointing.load(job, side.folder / name, step)
        )[1].to_dict()
        answer[f"{name} loaded"], conflicts = fingerprint(job)
        answer["conflicts"] += conflicts
        same = side.topology == side.saved
        until = LAST_STEP if same else step + 1
        answer["losses"][name] = model.train(job, side.shape, until)
        answer[f"{name} end"], conflicts = fingerprint(job)
        answer["conflicts"] += conflicts
        del job
        side.clear()
    meter.close()
    return {**answer, **side.timed, "hits": _hits()}


def measure(payload: dict[str, Any]) -> dict[str, Any]:
    """Stock fully_reshardable, stock dp_reshardable and vime_optim in turns on one state."""
    side = Side(payload, install=False)
    allow_optimizer_classes()
    number = torch.distributed.get_rank()
    options = {"device": payload["device"], "folder": payload["folder"], "out": payload["out"]}
    rank = Rank({**options, "ranks": payload["ranks"], "profile": False}, number)
    # Starts writers and managers, and loads libraries.
    tiny = model.Shape(width=160, layers=1, sequence=side.shape.sequence)
    job = side.build(SEED, tiny)
    model.train(job, tiny, 1)
    for variant in VARIANTS:
        rank.turn(job, variant)
    del job
    side.clear()
    side.timed.clear()
    job = side.build(SEED)
    model.train(job, side.shape, SYNC_STEP)
    own_bytes = gathered(_own_bytes(job))
    turns = []
    deadline = time.monotonic() + payload["budget_s"]
    last_s: dict[str, float] = {}
    for variant in payload["turns"]:
        if not _agree(time.monotonic() + 1.2 * last_s.get(variant, 0.0) < deadline):
            continue
        began = time.monotonic()
        turns.append({"variant": variant, **rank.turn(job, variant)})
        last_s[variant] = time.monotonic() - began
        if number == 0:
            rank.result = {"turns": turns, "own_bytes": own_bytes}
            rank.write()
    rank.meter.close()
    return {"turns": turns, "own_bytes": own_bytes, **side.timed}


def _async_queue(mode: str) -> Any:
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    return AsyncCallsQueue(persistent=mode == "persistent")


def _agree(answer: bool) -> bool:
    """Rank 0's answer."""
    box = [answer]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def _own_bytes(job: Job) -> int:
    from benchmarks.state import own_and_held_bytes

    return own_and_held_bytes(job)[0]  # type: ignore[arg-type]


def parameters(job: Job) -> int:
    """Elements of the global model, each counted once."""
    from benchmarks.fingerprint import parameter_parts

    shapes = {
        part.key: part.global_shape for parts in parameter_parts(job).values() for part in parts
    }
    return sum(torch.Size(shape).numel() for shape in shapes.values())


def _hits() -> dict[str, int]:
    import vime_optim

    return dict(vime_optim.status().hits)

"""Planning at the scale of thousands of ranks, on one processor: stock and vime_optim.

`python -m benchmarks.scale` makes what the ranks of a job would send from its shape, and runs the
real functions of torch and megatron-core that rank 0 and one other rank run on it. Nothing is sent:
the bytes that would be are counted, and rank 0 unpickles them. What takes longer than its limit is
measured on fewer chunks and extrapolated; such figures carry a "~".
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import scale_ranks
from vime_optim.tools.megatron_source import resolve

WHO = ("stock", "ours")
_SAMPLE = 2048
"""Chunks of one key that stock's check is measured on; the rest is extrapolated."""


class Parts:
    """Seconds of this process by part, since other work on the machine would count in a clock's.

    An extrapolated part is named beside.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.extrapolated: list[str] = []

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began_s = time.process_time()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - began_s


def _fake_ranks(rank: int, world_size: int) -> None:
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group(
        "fake", store=FakeStore(), rank=rank, world_size=world_size
    )


def make_inputs(name: str, keys: str, folder: Path) -> None:
    """Writes what every rank sends: plans, results and shards; pickled as by stock, and ours."""
    from vime_optim.planning import exchange, shards
    from vime_optim.planning.results import pack_results
    from vime_optim.planning.save_plans import pack_plan

    planner, layout = scale_ranks.job(name, keys)
    files = {
        kind: open(folder / kind, "wb")  # noqa: SIM115
        for kind in (
            "plans.stock",
            "plans.ours",
            "shards.stock",
            "shards.ours",
            "results.stock",
            "results.ours",
        )
    }
    for rank in range(layout.world_size):
        held = list(scale_ranks.shards_of(planner, layout, rank))
        objects = scale_ranks.objects_of(layout, rank, planner.shape.layers)
        plan = scale_ranks.plan_of(iter(held), objects)
        columns = pack_plan(plan)
        assert columns is not None
        tensors = [shard.to_megatron(with_data=False) for shard in held]
        results = scale_ranks.results_of(plan, rank)
        for kind, sent in (
            ("plans.stock", plan),
            ("plans.ours", exchange._Sent(columns.to_bytes())),
            ("shards.stock", tensors),
            ("shards.ours", shards.pack(tensors)),
            ("results.stock", results),
            ("results.ours", pack_results(results)),
        ):
            data = pickle.dumps(sent)
            files[kind].write(len(data).to_bytes(8, "little") + data)
    for file in files.values():
        file.close()


def _sent(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while head := file.read(8):
            yield file.read(int.from_bytes(head, "little"))


def rank0(name: str, who: str, folder: Path) -> dict[str, Any]:
    """Rank 0's part of a first save and of a second one."""
    layout = scale_ranks.JOBS[name][1]
    _fake_ranks(0, layout.world_size)
    if who == "ours":
        import vime_optim
        from vime_optim.commit import sessions
        from vime_optim.files.manifest import amend
        from vime_optim.planning.metadata_file import write_metadata

        vime_optim.install(only=("planning",))
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
    from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner

    parts, later = Parts(), Parts()
    before_bytes = _peak_bytes()
    _integrity(folder / f"shards.{who}", who, parts)
    with parts.timed("receive plans"):
        plans = [pickle.loads(data) for data in _sent(folder / f"plans.{who}")]
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    if who == "ours":
        with parts.timed("global plan and check"):
            _, metadata = planner.create_global_plan(plans)
    else:
        metadata = _stock_global_plan(planner, plans, parts)
        metadata.all_local_plans = plans
    for which in (parts, later) if who == "ours" else (parts,):
        if which is later:
            with later.timed("global plan and check"):
                _, metadata = planner.create_global_plan(plans)
        with which.timed("receive results"):
            results = [pickle.loads(data) for data in _sent(folder / f"results.{who}")]
        target = folder / f"checkpoint.{who}"
        target.mkdir(exist_ok=True)
        writer = FileSystemWriterAsync(str(target))
        with which.timed("write .metadata"):
            if who == "ours":
                write_metadata(FileSystemWriterAsync.finish, writer, metadata, results)
            else:
                writer.finish(metadata, results)
        if who == "ours":
            with which.timed("write manifest"):
                sessions.write_manifest(str(target), sessions.records_of(results) or [])
            with which.timed("amend manifest"):
                (target / "metadata.json").write_text("{}")
                amend(target, "metadata.json")
    manifest = target / "vime_optim_manifest.json"
    return {
        "seconds": parts.seconds,
        "extrapolated": parts.extrapolated,
        "later_seconds": later.seconds,
        "peak_bytes": _peak_bytes() - before_bytes,
        "metadata_bytes": (target / ".metadata").stat().st_size,
        "manifest_bytes": manifest.stat().st_size if manifest.exists() else 0,
        "chunks": sum(
            len(getattr(value, "chunks", ())) for value in metadata.state_dict_metadata.values()
        ),
        "plan_bytes_a_rank": (folder / f"plans.{who}").stat().st_size / layout.world_size - 8,
        "result_bytes_a_rank": (folder / f"results.{who}").stat().st_size / layout.world_size - 8,
        "shard_bytes_a_rank": (folder / f"shards.{who}").stat().st_size / layout.world_size - 8,
    }


def _integrity(path: Path, who: str, parts: Parts) -> None:
    from megatron.core.dist_checkpointing import validation

    with parts.timed("receive shards"):
        received: Any = [pickle.loads(data) for data in _sent(path)]
    if who == "ours":
        from vime_optim.planning import shards

        received = shards.GlobalShards(received)
    with parts.timed("check shards"):
        validation.validate_sharding_integrity(received)


def _stock_global_plan(planner: Any, plans: list[Any], parts: Parts) -> Any:
    """torch's own, its check apart: that is measured on a sample where it would take too long."""
    from torch.distributed.checkpoint import default_planner

    check = default_planner._validate_global_plan
    default_planner._validate_global_plan = lambda *_: []
    try:
        with parts.timed("global plan"):
            global_plan, metadata = planner.create_global_plan(plans)
    finally:
        default_planner._validate_global_plan = check
    seconds = 0.0
    for key, value in metadata.state_dict_metadata.items():
        chunks = getattr(value, "chunks", [])
        sample = chunks[:_SAMPLE]
        began_s = time.process_time()
        one = type(metadata)({key: _with_chunks(value, sample)})
        if len(chunks) > _SAMPLE:
            # One plan: a sample need not fill the tensor.
            check([], one)
            half_s = time.process_time() - began_s
            began_s = time.process_time()
            check([], type(metadata)({key: _with_chunks(value, sample[: _SAMPLE // 2])}))
            growth = min(2.0, max(1.0, _log2(half_s / (time.process_time() - began_s))))
            seconds += half_s * (len(chunks) / _SAMPLE) ** growth
            if "check" not in parts.extrapolated:
                parts.extrapolated.append("check")
        else:
            check(global_plan, one)
            seconds += time.process_time() - began_s
    parts.seconds["check"] = seconds
    return metadata


def _log2(ratio: float) -> float:
    import math

    return math.log2(max(ratio, 1e-9))


def _with_chunks(value: Any, chunks: list[Any]) -> Any:
    if not hasattr(value, "chunks"):
        return value
    return type(value)(value.properties, value.size, chunks)


def other_rank(name: str, keys: str, who: str, folder: Path, limit_s: float) -> dict[str, Any]:
    """A rank that is not rank 0: its plan of a save, and of a load of the checkpoint just made."""
    planner, layout = scale_ranks.job(name, keys)
    rank = layout.world_size // 2 + 1
    _fake_ranks(rank, layout.world_size)
    if who == "ours":
        import vime_optim

        vime_optim.install(only=("planning",))
    from megatron.core.dist_checkpointing.strategies import torch as strategy

    parts = Parts()
    held = list(scale_ranks.shards_of(planner, layout, rank))
    tensors = [shard.to_megatron(with_data=True) for shard in held]
    with parts.timed("save: send shards"):
        bare = [tensor.without_data() for tensor in tensors]
        if who == "ours":
            from vime_optim.planning import shards

            bare = shards.pack(bare)
        pickle.dumps(bare)
    with parts.timed("save: local plan"):
        local = _local_state(strategy, tensors, main_only=True)
        save_planner = strategy.MCoreSavePlanner(
            dedup_replicated_tensors=False, flatten_state_dict=False
        )
        save_planner.set_up_planner(local, is_coordinator=False)
        plan = save_planner.create_local_plan()
    made = scale_ranks.plan_of(iter(held), [])
    assert sorted(plan.items, key=_place) == sorted(made.items, key=_place), "the inputs differ"
    with parts.timed("save: send plan"):
        if who == "ours":
            from vime_optim.planning.save_plans import pack_plan

            packed = pack_plan(plan)
            assert packed is not None
            pickle.dumps(packed.to_bytes())
        else:
            pickle.dumps(plan)
    _plan_load(strategy, tensors, folder / f"checkpoint.{who}", parts, limit_s)
    return {"seconds": parts.seconds, "extrapolated": parts.extrapolated}


def _place(item: Any) -> tuple[str, tuple[int, ...]]:
    return item.index.fqn, tuple(item.index.offset)


def _local_state(strategy: Any, tensors: list[Any], *, main_only: bool) -> dict[str, Any]:
    by_key: dict[str, list[Any]] = {}
    for tensor in tensors:
        if not main_only or not any(tensor.replica_id):
            by_key.setdefault(tensor.key, []).append(tensor)
    made: dict[str, Any] = strategy.mcore_to_pyt_state_dict(by_key, not main_only)
    return made


def _plan_load(
    strategy: Any, tensors: list[Any], directory: Path, parts: Parts, limit_s: float
) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    with parts.timed("load: read .metadata"):
        metadata = FileSystemReader(str(directory)).read_metadata()
    for tensor in tensors:
        tensor.data = tensor.data.view(tensor.local_shape)
    with parts.timed("load: template"):
        template = _local_state(strategy, tensors, main_only=False)
    began_s, done = time.process_time(), 0
    for key, value in template.items():
        planner = strategy.MCoreLoadPlanner(flatten_state_dict=False)
        planner.state_dict, planner.metadata = {key: value}, metadata
        planner.create_local_plan()
        done += 1
        if time.process_time() - began_s > limit_s:
            break
    seconds = time.process_time() - began_s
    if done < len(template):
        seconds *= len(template) / done
        parts.extrapolated.append("load: local plan")
    parts.seconds["load: local plan"] = seconds


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(name: str, keys: str, megatron: str, limit_s: float) -> dict[str, Any]:
    """One job, each step in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="vime_optim_scale_") as folder:
        tree = str(resolve(megatron))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([tree, *sys.path[:1]])}
        base = [sys.executable, "-m", "benchmarks.scale", "--folder", folder, "--keys", keys]
        base += ["--job", name, "--limit", str(limit_s)]

        def step(*what: str) -> dict[str, Any]:
            done = subprocess.run(
                [*base, "--step", *what], env=environment, capture_output=True, text=True
            )
            if done.returncode:
                raise SystemExit(done.stderr)
            answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
            return answer

        step("inputs", "both")
        answer: dict[str, Any] = {"job": name, "keys": keys, "megatron": megatron}
        answer["ranks"] = scale_ranks.JOBS[name][1].world_size
        for who in WHO:
            answer[who] = {"rank0": step("rank0", who)}
        for who in WHO:
            answer[who]["other"] = step("other", who)
        return answer


def _run_step(args: argparse.Namespace) -> None:
    what, who = args.step
    folder = Path(args.folder)
    steps: dict[str, Callable[[], Any]] = {
        "inputs": lambda: make_inputs(args.job, args.keys, folder),
        "rank0": lambda: rank0(args.job, who, folder),
        "other": lambda: other_rank(args.job, args.keys, who, folder, args.limit),
    }
    print(json.dumps(steps[what]() or {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", choices=scale_ranks.JOBS)
    parser.add_argument("--keys", choices=("stacked", "singleton"))
    parser.add_argument("--megatron", default="0.16.1")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for stock's load plan")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    parser.add_argument("--step", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        _run_step(args)
        return
    answers = []
    for name in [args.job] if args.job else scale_ranks.JOBS:
        for keys in [args.keys] if args.keys else ("stacked", "singleton"):
            answers.append(measure(name, keys, args.megatron, args.limit))
            print(json.dumps(answers[-1], indent=1), flush=True)
            if args.json:
                args.json.write_text(json.dumps(answers, indent=1) + "\n")


if __name__ == "__main__":
    main()

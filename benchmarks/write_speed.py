"""How fast one node writes a checkpoint: raw parallel writes, Megatron's writer, ours. One run.

    python benchmarks/write_speed.py --megatron 0.19.2 --folder /dev/shm --ranks 2 --mib 1024

Every variant writes the same bytes of host tensors from the same processes, fsync included, one
after the other, in turns; the time of a variant is that of its slowest rank. 'raw' opens as many
files as Megatron's writer does (two a rank) and hands each its share by plain write calls; 'raw8'
opens eight a rank. No GPU and no Transformer Engine is needed. Ratios hold for one run; absolute
numbers depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
SMALL = 200  # norms, biases and small boxes that a real state has beside its large tensors
SMALL_NUMEL = 1000
LARGE = 24
RAW_WRITE_BYTES = 4 << 20


def make_state(mib: int, layout: str) -> dict[str, torch.Tensor]:
    """fp32 tensors of `mib` MiB in all: own storages, or views of one flat buffer."""
    numel = mib * (1 << 18)
    large = (numel - SMALL * SMALL_NUMEL) // LARGE
    sizes = [large] * LARGE + [SMALL_NUMEL] * SMALL
    flat = torch.rand(sum(sizes))
    state = {}
    offset = 0
    for number, size in enumerate(sizes):
        part = flat[offset : offset + size]
        state[f"optimizer.state.exp_avg.layer{number}"] = (
            part if layout == "views" else part.clone()
        )
        offset += size
    return state


def write_raw(folder: Path, rank: int, state: dict[str, torch.Tensor], files: int) -> None:
    """The tensors' bytes, split evenly over `files` files, each by one thread."""
    views = [memoryview(t.numpy()).cast("B") for t in state.values()]
    shares: list[list[memoryview]] = [[] for _ in range(files)]
    loads = [0] * files
    for view in sorted(views, key=len, reverse=True):
        lightest = loads.index(min(loads))
        shares[lightest].append(view)
        loads[lightest] += len(view)

    def work(number: int) -> None:
        fd = os.open(folder / f"raw{rank}_{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for view in shares[number]:
            for start in range(0, len(view), RAW_WRITE_BYTES):
                os.write(fd, view[start : start + RAW_WRITE_BYTES])
        os.fsync(fd)
        os.close(fd)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(files)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def write_by_megatron(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """Megatron's own path from plan to results, with or without our fixes in force."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
    from torch.distributed.checkpoint import DefaultSavePlanner

    writer = FileSystemWriterAsync(str(folder), thread_count=2)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(state, is_coordinator=True)
    plan = planner.create_local_plan()
    plan = planner.finish_plan(writer.prepare_decentralized_global_plan(plan))
    writer.prepare_write_data(plan, planner)
    save, preload, arguments = writer.get_save_function_and_args()
    arguments[1] = preload()
    save(*arguments)
    results = writer.retrieve_write_results()
    if not isinstance(results, list):
        raise RuntimeError(f"the write failed: {results}")


class WithoutDigests:
    """A hash that does nothing, to see what the digests cost."""

    def update(self, data: Any) -> None: ...
    def digest(self) -> bytes:
        return bytes(8)


def variants(
    folder: Path, rank: int, state: dict[str, torch.Tensor]
) -> dict[str, Callable[[], None]]:
    from vime_optim.files import fastfile
    from vime_optim.fixes import FIXES
    from vime_optim.installation import Installation

    real_hash = fastfile.xxhash.xxh3_64

    def ours(digests: bool = True) -> None:
        writer = [fix for fix in FIXES if fix.id.startswith("writer-")]
        installation = Installation(writer, (), strict=True)
        installation.apply()
        fastfile.xxhash.xxh3_64 = real_hash if digests else WithoutDigests
        try:
            write_by_megatron(folder, state)
        finally:
            fastfile.xxhash.xxh3_64 = real_hash
            installation.remove()

    return {
        "raw": lambda: write_raw(folder, rank, state, 2),
        "raw8": lambda: write_raw(folder, rank, state, 8),
        "stock": lambda: write_by_megatron(folder, state),
        "ours": ours,
        "ours without digests": lambda: ours(digests=False),
    }


def run_rank(rank: int, arguments: argparse.Namespace, folder: Path) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(arguments.ranks)
    store = torch.distributed.FileStore(str(folder / "store"), arguments.ranks)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=arguments.ranks)
    torch.set_num_threads(1)
    report: dict[str, Any] = {}
    for layout in ("own", "views"):
        state = make_state(arguments.mib, layout)
        target = folder / layout
        target.mkdir(exist_ok=True)
        seconds: dict[str, list[float]] = {}
        for turn in range(arguments.repeats + 1):
            for name, write in variants(target, rank, state).items():
                if rank == 0:
                    for old in target.iterdir():
                        old.unlink()
                torch.distributed.barrier()
                began = time.perf_counter()
                write()
                mine = torch.tensor([time.perf_counter() - began])
                torch.distributed.all_reduce(mine, torch.distributed.ReduceOp.MAX)
                # The first turn warms up, and has stock's manager process in it.
                seconds.setdefault(name if turn else f"first {name}", []).append(float(mine))
        report[layout] = seconds
    if rank == 0:
        (folder / "report.json").write_text(json.dumps(report))
    torch.distributed.barrier()
    # Stock's writer started helpers by spawn, which would keep our output open after us.
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(0)


def summary(report: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    total = arguments.ranks * arguments.mib * (1 << 20)
    rows = {}
    for layout, seconds in report.items():
        raw = max(total / statistics.median(seconds[name]) for name in ("raw", "raw8"))
        for name, times in seconds.items():
            rate = total / statistics.median(times)
            rows[f"{layout}: {name}"] = {
                "median_s": round(statistics.median(times), 3),
                "range_s": [round(min(times), 3), round(max(times), 3)],
                "gb_per_s": round(rate / 1e9, 3),
                "of_raw": round(rate / raw, 3),
            }
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "commit": commit,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processors": len(os.sched_getaffinity(0)),
        "folder": str(arguments.folder),
        "ranks": arguments.ranks,
        "mib_per_rank": arguments.mib,
        "repeats": arguments.repeats,
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megatron", required=True, help="a release, or a folder with megatron/")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=512, help="state of one rank, MiB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # no compiler is needed to write files
    sys.path.insert(0, str(ROOT))
    from vime_optim.simulate.triton_stub import provide_triton
    from vime_optim.tools.megatron_source import resolve

    sys.path.insert(0, str(resolve(arguments.megatron)))
    provide_triton()
    torch.cuda.synchronize = lambda *_: None  # stock calls it after staging, device or not
    import megatron.core.dist_checkpointing.strategies.filesystem_async  # noqa: F401

    folder = arguments.folder / f"vime_optim_write_speed_{os.getpid()}"
    folder.mkdir(parents=True)
    ranks: list[int] = []
    try:
        for rank in range(arguments.ranks):
            pid = os.fork()
            if pid == 0:
                try:
                    run_rank(rank, arguments, folder)
                except BaseException:
                    traceback.print_exc()
                os._exit(1)
            ranks.append(pid)
        for _ in range(arguments.ranks):
            _, status = os.wait()
            if status:
                raise SystemExit("a rank failed")
        result = summary(json.loads((folder / "report.json").read_text()), arguments)
    finally:
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{'':34}{'median s':>9}{'GB/s':>8}{'of raw':>8}")
    for name, row in result["rows"].items():
        print(f"{name:34}{row['median_s']:9.3f}{row['gb_per_s']:8.2f}{row['of_raw']:8.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

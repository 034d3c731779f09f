"""Saving and loading: stock fully_reshardable, stock dp_reshardable and vime_optim in one run.

    python -m benchmarks                                  # simulated device, 24 GB of memory do
    python -m benchmarks --device cuda --size 1.2b --backend hybrid --backend fused
    python -m benchmarks --device cuda --run 1.2b/hybrid,fully=2 --run 8b/hybrid,only=ours
    python -m benchmarks --report benchmarks/results/NAME.json     # table and plots of a result

Each backend's state is built once; the three take turns on it in the order ABC, CBA, ABC. A turn
saves weights and optimizer through megatron-core's own dist_checkpointing, overwrites the state,
loads it back and compares the bits of every tensor. Reported are medians and ranges of the
slowest rank, memory above what the rank held before, bytes that collectives must move and bytes
read, beside plain parallel writes and reads of the same bytes on the same file system.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.configurations import WORDS, Configuration, asked_for, parse_run, that_fit


def main(words: list[str] | None = None) -> None:
    arguments = _parse(words)
    if arguments.report is not None:
        tables.write_all(json.loads(arguments.report.read_text()), arguments.report, arguments.img)
        return
    from benchmarks.run import environment_of, run_ranks
    from vime_optim.tools.megatron_source import resolve

    fitting = that_fit(
        asked_for(arguments),
        ranks=arguments.ranks,
        device=arguments.device,
        folder=arguments.folder,
    )
    options = _options(arguments, str(resolve(arguments.megatron)), fitting)
    settings = {key: options[key] for key in _SETTINGS}
    result: dict[str, Any] = {**environment_of(options), "settings": settings}
    result.update(run_ranks(options, arguments.timeout))
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
        tables.write_all(result, arguments.json, arguments.img)
    else:
        print(tables.markdown(result))
    if "problem" in result:
        raise SystemExit(f"the benchmark was cut short: {result['problem']}")


_SETTINGS = ("configurations", "repeats", "warm_up", "threads", "raw_bytes", "prefault_bytes")


def _options(
    arguments: argparse.Namespace, megatron: str, configurations: list[Configuration]
) -> dict[str, Any]:
    from benchmarks.fit import host_bytes

    cuda = arguments.device == "cuda"

    def with_memory(one: Configuration) -> dict[str, Any]:
        needed = {
            variant: host_bytes(one.size, one.backend, variant, arguments.ranks, arguments.device)
            for variant in one.variants
        }
        return {**one.to_dict(), "host_bytes": needed}

    threads = max(1, len(os.sched_getaffinity(0)) // arguments.ranks) if cuda else 1
    work = Path(tempfile.mkdtemp(prefix="vime-bench-"))
    folder = Path(tempfile.mkdtemp(prefix="vime-bench-", dir=arguments.folder))
    return {
        "megatron": megatron,
        "device": arguments.device,
        "ranks": arguments.ranks,
        "threads": threads,
        "folder": str(folder),
        "out": str(arguments.logs or work),
        "configurations": [with_memory(one) for one in configurations],
        "repeats": arguments.repeats,
        "warm_up": arguments.warm_up or ("tiny" if cuda else "full"),
        "raw_bytes": int(arguments.raw_gb * 1e9),
        "copy_bytes": 1 << (30 if cuda else 27),
        "prefault_bytes": int(arguments.prefault_gb * 1e9) // arguments.ranks,
        "budget_s": arguments.budget,
        "commit": arguments.commit,
        "profile": arguments.profile,
    }


def _parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cpu simulates a device")
    add("--megatron", default="0.19.2", help="a release, or a folder with megatron/")
    add("--ranks", type=int, default=2, help="data-parallel size, all on this machine")
    add("--size", action="append", help="parameters, a name of state.SIZES; may be repeated")
    add("--backend", action="append", help="a name of state.BACKENDS; may be repeated")
    add(
        "--run",
        action="append",
        type=parse_run,
        metavar="SIZE/BACKEND[,rounds=N][,fully=N][,only=WORD[+WORD]]",
        help="a size, a backend, and what differs from --repeats, --fully-rounds and --only for"
        " them; may be repeated, and takes the place of --size and --backend or comes after them",
    )
    add("--only", action="append", choices=WORDS, help="variants; may be repeated, default all")
    add("--repeats", type=int, default=3, help="rounds that count, and of plain I/O")
    add("--fully-rounds", type=int, default=99, help="rounds of stock fully_reshardable at most")
    add("--warm-up", choices=("full", "tiny"), help="a round of the real size, or of a tiny model")
    add("--folder", type=Path, default=Path("/dev/shm"), help="where checkpoints are written")
    add("--raw-gb", type=float, default=0.5, help="plain writes and reads: GB a rank, 0 for none")
    add("--prefault-gb", type=float, default=0.0, help="memory touched before all, in all ranks")
    add("--budget", type=float, default=3600.0, help="seconds; turns that do not fit are left out")
    add("--timeout", type=float, default=3600.0, help="seconds, then the ranks are ended")
    add("--json", type=Path, help="write the result here, the table and the plots beside it")
    add("--img", type=Path, help="folder for the plots, else beside the result")
    add("--logs", type=Path, help="keep the output of the ranks here")
    add("--profile", action="store_true", help="profiles of rank 0's full warm-up, beside its log")
    add("--commit", default="", help="commit, where there is no git")
    add("--report", type=Path, help="only write table and plots of this result")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()

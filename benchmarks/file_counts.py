"""How many files a rank: saves and loads with each number in turns, beside raw I/O with as many.

    python -m benchmarks.file_counts --device cuda --ranks 1 --run 1.2b/hybrid \
        --files 8 --files 16 --rounds 3 --prefault-gb 70 --json OUT.json
    python -m benchmarks.file_counts --run 2m/hybrid --files 2 --files 4        # a rehearsal

One launch and one state. A round saves and loads once with each number of files, and writes and
reads as many plain bytes by the same number of threads; the order turns round by round. Seconds
are those of the slowest rank. More ranks than GPUs share them, by gloo and host copies.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run_rank(options: dict[str, Any], number: int) -> None:
    from benchmarks.rank import start

    if options["ranks_per_device"] > 1:
        from benchmarks.staging import stage_collectives

        stage_collectives()
    with start(options, number) as (rank, fits):
        from benchmarks import rawio

        rank.note("prefault_s", rawio.prefault(options["prefault_bytes"]))
        rank.note("rows", [])
        for run in options["runs"]:
            _run(rank, *run.split("/"), fits)


def _run(rank: Any, size: str, backend: str, fits: Callable[[float], bool]) -> None:
    from benchmarks import rawio, state
    from benchmarks.rank import OURS, gathered
    from vime_optim.commit import file_plan

    job = state.build(state.SIZES[size], state.BACKENDS[backend], simulated=rank.simulated)
    share = sum(p.numel() * p.element_size() for p in job.gpt.parameters()) // rank.options["ranks"]
    written = gathered(state.own_and_held_bytes(job)[0] + share)
    counts = rank.options["files"]
    original = file_plan.file_count
    for turn in range(rank.options["rounds"] + 1):  # the first warms up
        for files in counts if turn % 2 else counts[::-1]:
            if not fits(0.0):
                return
            file_plan.file_count = lambda stock, items, files=files: files
            phases = rank.turn(job, OURS)
            file_plan.file_count = original
            raw = rawio.limits(rank.folder, rank.number, max(written), 1, (files,))
            if turn:
                row = {"size": size, "backend": backend, "files": files, "written_bytes": written}
                rank.note("rows", [*rank.result["rows"], {**row, **_flat(phases), "raw": raw}])


def _flat(turn: dict[str, Any]) -> dict[str, Any]:
    """{save_s, load_s, seconds and parts by phase} of a turn, of the slowest rank in each phase."""
    flat: dict[str, Any] = {"save_s": 0.0, "load_s": 0.0}
    for part, phases in turn.items():
        if "error" in phases:
            return {"error": phases["error"]}
        for name, phase in phases.items():
            if isinstance(phase, dict):
                slowest = max(range(len(phase["seconds"])), key=phase["seconds"].__getitem__)
                flat[name] = {"s": phase["seconds"][slowest], **phase["parts"][slowest]}
                flat[f"{part}_s"] += phase["seconds"][slowest]
    flat["stored_bytes"] = turn["save"]["stored_bytes"][0]
    flat["wrong_states"] = sum(turn["load"]["wrong_states"])
    return flat


def table(result: dict[str, Any]) -> str:
    """Medians by state and number of files, as Markdown."""
    heads = ["", "files a rank"]
    for part in ("save", "load"):
        heads += [f"{part}, s", "GB/s", "raw, GB/s", "of raw"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        if "error" not in row:
            groups.setdefault((f"{row['size']}/{row['backend']}", row["files"]), []).append(row)
    for (name, files), rows in groups.items():
        cells = [name, str(files)]
        for part, direction in (("save", "write"), ("load", "read")):
            seconds = statistics.median(row[f"{part}_s"] for row in rows)
            raw = statistics.median(row["raw"][direction][str(files)][0] for row in rows)
            rate = rows[0]["stored_bytes"] / seconds
            spread = [row[f"{part}_s"] for row in rows]
            cells += [f"{seconds:.3f} ({min(spread):.3f} to {max(spread):.3f})"]
            cells += [f"{rate / 1e9:.1f}", f"{raw / 1e9:.1f}", f"{rate / raw:.0%}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--megatron", default="0.19.2")
    add("--ranks", type=int, default=2)
    add("--run", action="append", help="SIZE/BACKEND; may be repeated")
    add("--files", type=int, action="append", required=True)
    add("--rounds", type=int, default=3)
    add("--folder", type=Path, default=Path("/dev/shm"))
    add("--prefault-gb", type=float, default=0.0)
    add("--timeout", type=float, default=600.0)
    add("--commit", default="")
    add("--json", type=Path)
    given = parser.parse_args()
    import torch

    from benchmarks.run import environment_of, run_ranks
    from vime_optim.tools.megatron_source import resolve

    devices = torch.cuda.device_count() if given.device == "cuda" else given.ranks
    per_device = -(-given.ranks // max(1, devices))
    options = {
        "program": "benchmarks.file_counts",
        "megatron": str(resolve(given.megatron)),
        "device": given.device,
        "ranks": given.ranks,
        "ranks_per_device": per_device,
        "backend": "gloo" if per_device > 1 else None,
        "threads": max(1, len(os.sched_getaffinity(0)) // given.ranks),
        "folder": tempfile.mkdtemp(prefix="vime-bench-", dir=given.folder),
        "out": tempfile.mkdtemp(prefix="vime-bench-"),
        "runs": given.run or ["2m/hybrid"],
        "files": given.files,
        "rounds": given.rounds,
        "prefault_bytes": int(given.prefault_gb * 1e9) // given.ranks,
        "budget_s": 0.8 * given.timeout,
        "profile": False,
        "commit": given.commit,
    }
    result = {**environment_of(options), **run_ranks(options, given.timeout)}
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


if __name__ == "__main__":
    if sys.argv[1].endswith("options.json"):
        run_rank(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))
    else:
        main()

"""A process beside a rank that samples the rank's memory, so that no lock of the rank delays it.

Program: `python sampler.py PID`. Reads lines "begin" and "end" on standard input and answers each
with one JSON line: {"now_bytes": ...} and {"peak_bytes": ..., "rank_peak_bytes": ...}.

Memory of a rank is its resident set plus what its children (writers, managers) hold for themselves
alone; pages that a forked child shares with the rank are not counted twice.
"""

from __future__ import annotations

import json
import os
import select
import sys
from pathlib import Path

INTERVAL_S = 0.004
#: Reading what a child holds for itself walks its page tables, so it is done less often.
CHILDREN_EVERY = 25
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * PAGE_BYTES


def children_bytes(pid: int) -> int:
    """Private memory of all descendants but this process."""
    total = 0
    for child in _children(pid):
        if child == os.getpid():
            continue
        try:
            text = Path(f"/proc/{child}/smaps_rollup").read_text()
        except OSError:
            continue  # it has ended
        for line in text.splitlines():
            if line.startswith(("Private_Clean:", "Private_Dirty:")):
                total += int(line.split()[1]) * 1024
        total += children_bytes(child)
    return total


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            text = Path(f"/proc/{pid}/task/{task}/children").read_text()
            found += [int(word) for word in text.split()]
    except OSError:
        pass
    return found


def main() -> None:
    pid = int(sys.argv[1])
    running = False
    peak = rank_peak = children = count = 0
    while True:
        ready, _, _ = select.select([sys.stdin], [], [], INTERVAL_S if running else None)
        if ready:
            command = sys.stdin.readline().strip()
            if not command:
                return
        try:
            rank_bytes = resident_bytes(pid)
        except OSError:
            return
        if ready or count % CHILDREN_EVERY == 0:
            children = children_bytes(pid)
        count += 1
        if ready and command == "begin":
            running, peak, rank_peak = True, 0, 0
            print(json.dumps({"now_bytes": rank_bytes + children}), flush=True)
        peak = max(peak, rank_bytes + children)
        rank_peak = max(rank_peak, rank_bytes)
        if ready and command == "end":
            running = False
            print(json.dumps({"peak_bytes": peak, "rank_peak_bytes": rank_peak}), flush=True)


if __name__ == "__main__":
    main()

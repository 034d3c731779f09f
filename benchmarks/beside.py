"""What a loop of plain Python loses beside writers, and to what: `python -m benchmarks.beside`.

Writers of three kinds run for a slice and rest for the next, in turns; the loop's rates in
neighbouring slices are compared, which leaves out what a machine's other guests do meanwhile.

    threads    of this process, as an async save has them: a write and a digest for each 64 MiB
    small      the same with writes of 32 MiB and digests of 8 MiB: six turns of the interpreter's
               lock where `threads` takes one and a half
    process    `threads` in a process of their own: what is lost beside them is lost to the
               processors and the memory, not to the interpreter's lock
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash

from vime_optim.files.fastfile import create_new

_MIB = 1 << 20
KINDS = {"threads": (64, 64), "small": (32, 8), "process": (64, 64)}
"""MiB that are written, and digested, at a time."""


class Writers:
    """Threads that write host memory to new files, over and over."""

    def __init__(self, threads: int, kind: str, folder: Path, each_bytes: int) -> None:
        self.unit_bytes, self.digest_bytes = (_MIB * size for size in KINDS[kind])
        self.folder = folder
        self.written_bytes = [0] * threads
        self._go = threading.Event()
        self._ended = False
        sources = [torch.ones(each_bytes, dtype=torch.uint8).numpy() for _ in range(threads)]
        self._threads = [
            threading.Thread(target=self._write, args=(number, memoryview(source)), daemon=True)  # type: ignore[arg-type]
            for number, source in enumerate(sources)
        ]
        for thread in self._threads:
            thread.start()

    def _write(self, number: int, source: memoryview) -> None:
        path = self.folder / f"beside_{os.getpid()}_{number}"
        while not self._ended:
            fd = create_new(path)
            for at in range(0, len(source), self.unit_bytes):
                self._go.wait()
                unit = source[at : at + self.unit_bytes]
                os.writev(fd, [unit])
                for start in range(0, len(unit), self.digest_bytes):
                    xxhash.xxh3_64_digest(unit[start : start + self.digest_bytes])
                self.written_bytes[number] += len(unit)
            os.close(fd)
            path.unlink()

    def on(self) -> None:
        self._go.set()

    def off(self) -> None:
        self._go.clear()

    def end(self) -> float:
        """Stops them. Returns the bytes that they wrote."""
        self._ended = True
        self._go.set()
        for thread in self._threads:
            thread.join()
        return sum(self.written_bytes)


class WriterProcess:
    """Writers in a process of their own, which is stopped in every other slice."""

    def __init__(self, *words: Any) -> None:
        command = [sys.executable, "-m", "benchmarks.beside", "--write", *map(str, words)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it is ready
        self.off()

    def on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def off(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def end(self) -> float:
        self.on()
        return float(self._process.communicate("end\n")[0])


def python_loop(seconds: float) -> float:
    """Rounds a second of plain Python."""
    rounds = 0
    value = {}
    began = time.perf_counter()
    while (passed := time.perf_counter() - began) < seconds:
        for number in range(200):
            value[number & 31] = number * 3 ^ rounds
        rounds += 1
    return rounds / passed


def torch_loop(seconds: float) -> float:
    """Rounds a second of small operations of torch, each of which lets go of the lock."""
    value = torch.zeros(64)
    rounds = 0
    began = time.perf_counter()
    while (passed := time.perf_counter() - began) < seconds:
        for _ in range(20):
            value.add_(1.0)
        rounds += 1
    return rounds / passed


LOOPS: dict[str, Callable[[float], float]] = {"python": python_loop, "torch": torch_loop}


def measure(kind: str, threads: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Slowdowns (median over the pairs of slices) beside one kind of writers."""
    each_bytes = arguments.gib * (1 << 30) // threads
    words = (threads, kind, arguments.folder, each_bytes)
    writers = WriterProcess(*words) if kind == "process" else Writers(*words)
    found: dict[str, Any] = {"kind": kind, "threads": threads}
    on_s = 0.0
    for name, loop in LOOPS.items():
        slowdowns = []
        for _ in range(arguments.pairs):
            before = loop(arguments.slice_s)
            writers.on()
            began = time.perf_counter()
            beside = loop(arguments.slice_s)
            writers.off()
            on_s += time.perf_counter() - began
            time.sleep(0.05)  # they end what they have begun
            slowdowns.append(1 - 2 * beside / (before + loop(arguments.slice_s)))
        found[name] = {"median": statistics.median(slowdowns), "all": slowdowns}
    found["bytes_per_s"] = writers.end() / on_s
    return found


def _write(words: list[str]) -> None:
    threads, kind, folder, each_bytes = words
    writers = Writers(int(threads), kind, Path(folder), int(each_bytes))
    writers.on()
    print("ready", flush=True)
    sys.stdin.readline()
    print(writers.end())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--gib", type=int, default=4, help="source memory of all threads")
    parser.add_argument("--slice-s", type=float, default=0.15)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", nargs=4, help="be the writers of another process")
    arguments = parser.parse_args()
    if arguments.write:
        _write(arguments.write)
        return
    torch.set_num_threads(1)
    rows = []
    for threads in arguments.threads:
        for kind in KINDS:
            row = measure(kind, threads, arguments)
            rows.append(row)
            slower = "  ".join(f"{name} {100 * row[name]['median']:5.1f}% slower" for name in LOOPS)
            print(f"{threads} {kind:8} {row['bytes_per_s'] / 1e9:5.2f} GB/s  {slower}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

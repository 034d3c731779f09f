"""Which plain way of writing a checkpoint's bytes is fastest: `python -m benchmarks.ways_to_write`.

Each rank writes the same bytes of its own memory, fsync included: by `write` with pieces of three
sizes, with `fallocate` before it, with O_DIRECT, and through a mapping (with huge pages asked for),
each with 2 to 16 files a rank, one thread a file. Then it reads them back. A time is that of the
slowest rank. No torch, no GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_PAGE_BYTES = 4096
_MIB = 1 << 20
WAYS = (
    ("write", 8), ("write", 1), ("write", 64), ("fallocate", 8), ("direct", 8),
    ("mapping", 64), ("mapping, huge pages", 64),
)  # fmt: skip
"""(name, MiB of a piece)."""


def write(path: Path, data: np.ndarray[Any, Any], way: str, piece_bytes: int) -> None:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if way == "direct" else 0)
    fd = os.open(path, flags, 0o644)
    if way.startswith("mapping"):
        _write_mapping(fd, data, piece_bytes, huge="huge" in way)
    else:
        if way == "fallocate":
            os.posix_fallocate(fd, 0, len(data))
        view = memoryview(data)
        for start in range(0, len(data), piece_bytes):
            piece = view[start : start + piece_bytes]
            while piece:
                piece = piece[os.write(fd, piece) :]
    os.fsync(fd)
    os.close(fd)


def _write_mapping(fd: int, data: np.ndarray[Any, Any], piece_bytes: int, *, huge: bool) -> None:
    os.ftruncate(fd, len(data))
    mapping = mmap.mmap(fd, len(data))
    if huge:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    target = np.frombuffer(mapping, dtype=np.uint8)
    for start in range(0, len(data), piece_bytes):
        length = min(piece_bytes, len(data) - start)
        ctypes.memmove(target.ctypes.data + start, data.ctypes.data + start, length)
    del target
    mapping.close()


def read(path: Path, data: np.ndarray[Any, Any], piece_bytes: int) -> None:
    fd = os.open(path, os.O_RDONLY)
    view = memoryview(data)
    done = 0
    while done < len(data):
        done += os.preadv(fd, [view[done : done + piece_bytes]], done)
    os.close(fd)


def _shares(data: np.ndarray[Any, Any], count: int) -> list[np.ndarray[Any, Any]]:
    step = -(-len(data) // count)
    step += -step % _PAGE_BYTES
    return [data[start : start + step] for start in range(0, len(data), step)]


def _side_by_side(calls: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def run_rank(options: argparse.Namespace, rank: int, barrier: Any, results: Any) -> None:
    size_bytes = int(options.gb * 1e9) // _PAGE_BYTES * _PAGE_BYTES
    data = np.frombuffer(mmap.mmap(-1, size_bytes), dtype=np.uint8)  # a mapping begins on a page
    data.view(np.uint64)[:] = np.arange(size_bytes // 8, dtype=np.uint64)
    rows: list[dict[str, Any]] = []
    for base in options.folder:
        folder = base / f"ways_to_write{rank}"
        shutil.rmtree(folder, ignore_errors=True)

        def timed(name: str, files: int, calls: Sequence[Callable[[], None]], base: Path) -> None:
            barrier.wait()
            began = time.perf_counter()
            _side_by_side(calls)
            barrier.wait()
            seconds = time.perf_counter() - began
            rate = options.ranks * size_bytes / seconds / 1e9
            row = {"folder": str(base), "way": name, "files_a_rank": files}
            rows.append({**row, "seconds": round(seconds, 3), "gb_per_s": round(rate, 2)})
            if rank == 0:
                print(*rows[-1].values(), sep="  ", flush=True)

        for files in options.files:
            shares = _shares(data, files)
            paths = [folder / str(number) for number in range(len(shares))]
            for way, piece_mib in WAYS:
                folder.mkdir()
                calls = [
                    lambda path=path, share=share, way=way, size=piece_mib * _MIB: write(
                        path, share, way, size
                    )
                    for path, share in zip(paths, shares, strict=True)
                ]
                timed(f"{way}, {piece_mib} MiB", files, calls, base)
                if way == WAYS[-1][0]:
                    for piece_mib in (8, 1):
                        calls = [
                            lambda path=path, share=share, size=piece_mib * _MIB: read(
                                path, share, size
                            )
                            for path, share in zip(paths, shares, strict=True)
                        ]
                        timed(f"read, {piece_mib} MiB", files, calls, base)
                shutil.rmtree(folder)
    if rank == 0:
        results.put(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, action="append", help="default: /dev/shm and /tmp")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gb", type=float, default=1.0, help="10**9 bytes of each rank")
    parser.add_argument("--files", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.folder = options.folder or [Path("/dev/shm"), Path("/tmp")]
    barrier, results = multiprocessing.Barrier(options.ranks), multiprocessing.Queue()
    processes = [
        multiprocessing.Process(target=run_rank, args=(options, rank, barrier, results))
        for rank in range(options.ranks)
    ]
    for process in processes:
        process.start()
    rows = results.get()
    for process in processes:
        process.join()
    if options.json:
        options.json.write_text(json.dumps({"ranks": options.ranks, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()

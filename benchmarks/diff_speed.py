"""How fast `diff` is against reading the same files: one JSON object, ratio of throughputs.

    python benchmarks/diff_speed.py [--size-bytes 8GiB] [--dir FOLDER] [--repeats 3] [--cold]

Two checkpoints of the given size with the same values in another sharding are written once. Each
repeat reads all their files with plain 4 MiB reads, then compares them. `--cold` drops the files
from the page cache before each pass (posix_fadvise), so that the disk is measured; without it both
come from memory where they fit, the harder case for `diff`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.tools.synthetic import write_synthetic
from vime_optim.tools.commands import byte_count
from vime_optim.tools.diff import diff_checkpoints

SHAPE = (16384, 4096)  # 256 MiB a tensor
BLOCK_BYTES = 4 << 20


def read_all(folders: list[Path]) -> int:
    """Bytes of all files, read one after the other into one buffer."""
    buffer, total = bytearray(BLOCK_BYTES), 0
    for folder in folders:
        for path in sorted(folder.iterdir()):
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    total += count
    return total


def forget(folders: list[Path]) -> None:
    """Drops the files from the page cache."""
    for folder in folders:
        for path in folder.iterdir():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def measure(folders: list[Path], repeats: int, cold: bool) -> dict[str, object]:
    """Medians of both, each repeat one after the other so that both see the same machine."""
    reads, diffs, ratios, total = [], [], [], 0
    for _ in range(repeats):
        if cold:
            forget(folders)
        start = time.perf_counter()
        total = read_all(folders)
        reads.append(time.perf_counter() - start)
        if cold:
            forget(folders)
        start = time.perf_counter()
        report = diff_checkpoints(*folders)
        diffs.append(time.perf_counter() - start)
        if report.verdict != 0:
            raise SystemExit(f"the two are not equal: {report}")
        ratios.append(reads[-1] / diffs[-1])
    return {
        "bytes": total,
        "read_s": reads,
        "diff_s": diffs,
        "read_bytes_per_s": total / statistics.median(reads),
        "diff_bytes_per_s": total / statistics.median(diffs),
        "ratio": statistics.median(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size-bytes", type=byte_count, default=8 << 30)
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cold", action="store_true")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="diff-speed-", dir=args.dir))
    try:
        tensors = max(1, args.size_bytes // (SHAPE[0] * SHAPE[1] * 4))
        folders = [root / "a", root / "b"]
        write_synthetic(folders[0], tensors=tensors, shape=SHAPE, chunks=(4, 1))
        write_synthetic(folders[1], tensors=tensors, shape=SHAPE, chunks=(3, 1))
        result = measure(folders, args.repeats, args.cold)
    finally:
        shutil.rmtree(root)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    machine = {
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": psutil.cpu_count(),
        "load_average": os.getloadavg()[0],
        "memory_bytes": psutil.virtual_memory().total,
        "cold": args.cold,
    }
    print(json.dumps({**result, **machine}, indent=1))


if __name__ == "__main__":
    main()

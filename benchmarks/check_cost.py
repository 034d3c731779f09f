"""What digests add to a load: `python -m benchmarks.check_cost --gib 8 --out X.json`.

One process writes files with their manifest, drops nothing from the page cache, and then in turns
reads all tensors into place (as a load does) without digests, the same with what was read compared
afterwards (VIME_OPTIM_VERIFY=read), and verifies every byte (=all). `--device cuda` reads
them onto the device. Medians of the turns after a warm-up; a ratio is the median of the turns'
ratios, as neighbours in time see the same machine. This is reading alone, from memory, where
digests cost most: a load also plans, and a disk or a network is slower.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from vime_optim.commit.load_check import Comparison
from vime_optim.files.checked import note, noting
from vime_optim.files.fastfile import write_file
from vime_optim.files.filling import Source
from vime_optim.files.geometry import whole
from vime_optim.files.items import FileWindow, read_layout
from vime_optim.files.manifest import Manifest, read_manifest, verify_files
from vime_optim.files.reading import BoxReader, default_threads

_FILES = 8
_TENSOR_BYTES = 64 << 20


def make(folder: Path, total_bytes: int) -> list[Source]:
    """Files of float32 tensors; where each tensor lies."""
    manifest = Manifest()
    sources = []
    values = torch.randint(-(2**31), 2**31 - 1, (_TENSOR_BYTES // 4,), dtype=torch.int32)
    tensor = values.view(torch.float32)
    count = max(1, total_bytes // _FILES // _TENSOR_BYTES)
    for number in range(_FILES):
        path = folder / f"__0_{number}.distcp"
        extents, record = write_file(path, path.name, [tensor] * count)
        manifest.add(record)
        descriptor = os.open(path, os.O_RDONLY)
        for extent in extents:
            window = FileWindow(descriptor, extent.offset, extent.length)
            found = read_layout(window, extent.offset, extent.length, str(path))
            shape = found.shape
            at = (0,) * len(shape)
            sources.append(Source(str(path), "x", found.dtype, found.start_bytes, shape, at, shape))
        os.close(descriptor)
    manifest.write(folder)
    return sources


def load(folder: Path, sources: list[Source], targets: list[torch.Tensor], compares: bool) -> float:
    """Seconds to read all, with or without comparing digests."""
    comparison = Comparison(str(folder), read_manifest(folder))
    began = time.perf_counter()
    total_bytes = sum(source.nbytes for source in sources)
    with noting(comparison.chunks), BoxReader(total_bytes) as reader:
        for source, target in zip(sources, targets, strict=True):
            reader.read(source, target)
            if compares:
                note(source.path, *source.span(whole(source.shape)))
    if targets[0].device.type == "cuda":
        torch.cuda.synchronize()
    comparison.finish()
    return time.perf_counter() - began


def verify(folder: Path) -> float:
    began = time.perf_counter()
    manifest = read_manifest(folder)
    assert manifest is not None
    assert not verify_files(folder, list(manifest.records.values()), manifest.chunk_bytes)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--folder", default="/dev/shm")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        sources = make(folder, int(given.gib * (1 << 30)))
        targets = [torch.empty(s.shape, dtype=s.dtype, device=given.device) for s in sources]
        turns = []
        for turn in range(given.turns + 1):
            seconds = [0.0, 0.0]
            for compares in (turn % 2 == 0, turn % 2 == 1):  # each goes first as often
                seconds[compares] = load(folder, sources, targets, compares)
            turns.append((*seconds, verify(folder)))
    turns = turns[1:]
    total = sum(source.nbytes for source in sources)
    load_s, read_s, verify_s = (statistics.median(column) for column in zip(*turns, strict=True))
    result = {
        "bytes": total,
        "device": given.device,
        "threads": default_threads(),
        "load_s": load_s,
        "load_comparing_s": read_s,
        "verify_s": verify_s,
        "load_GBps": total / load_s / 1e9,
        "verify_GBps": total / verify_s / 1e9,
        "comparing_over_load": statistics.median(turn[1] / turn[0] for turn in turns),
        "verify_over_load": statistics.median(turn[2] / turn[0] for turn in turns),
        "turns": turns,
    }
    print(json.dumps(result, indent=1))
    if given.out:
        Path(given.out).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

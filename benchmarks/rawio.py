"""What the file system and the buses give: plain parallel writes and reads, and copies."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

CHUNK_BYTES = 8 << 20
BUFFER_BYTES = 128 << 20
FILE_COUNTS = (1, 2, 4, 8)


def limits(
    folder: Path,
    rank: int,
    total_bytes: int,
    repeats: int,
    file_counts: Sequence[int] = FILE_COUNTS,
) -> dict[str, Any]:
    """Bytes a second of all ranks together by files per rank: {"write": {...}, "read": {...}}.

    Every rank writes `total_bytes`, fsync included, from memory that is in use already, and reads
    it back into such memory; the slowest rank counts. All repeats are returned.
    """
    world = torch.distributed.get_world_size()
    result: dict[str, dict[str, list[float]]] = {"write": {}, "read": {}}
    for files in file_counts:
        share = total_bytes // files
        buffers = [bytearray(os.urandom(1 << 16) * (BUFFER_BYTES >> 16)) for _ in range(files)]
        paths = [folder / f"raw_{rank}_{number}" for number in range(files)]
        for _ in range(repeats):
            for direction, work in (("write", write_file), ("read", read_file)):
                seconds = _slowest(work, paths, buffers, share)
                rate = world * share * files / seconds
                result[direction].setdefault(str(files), []).append(rate)
            for path in paths:
                path.unlink()
    return result


def _slowest(
    work: Callable[[Path, bytearray, int], None],
    paths: list[Path],
    buffers: list[bytearray],
    share: int,
) -> float:
    threads = [
        threading.Thread(target=work, args=(path, buffer, share))
        for path, buffer in zip(paths, buffers, strict=True)
    ]
    torch.distributed.barrier()
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return slowest(time.perf_counter() - began)


def slowest(seconds: float) -> float:
    """The largest of all ranks' values."""
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, seconds)
    return float(max(values))


def write_file(path: Path, buffer: bytearray, size_bytes: int) -> None:
    view = memoryview(buffer)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    done = 0
    while done < size_bytes:
        start = done % len(buffer)
        length = min(CHUNK_BYTES, size_bytes - done, len(buffer) - start)
        done += os.write(fd, view[start : start + length])
    os.fsync(fd)
    os.close(fd)


def read_file(path: Path, buffer: bytearray, size_bytes: int) -> None:
    view = memoryview(buffer)
    fd = os.open(path, os.O_RDONLY)
    done = 0
    while done < size_bytes:
        start = done % len(buffer)
        length = min(CHUNK_BYTES, size_bytes - done, len(buffer) - start)
        done += os.preadv(fd, [view[start : start + length]], done)
    os.close(fd)


def copies(size_bytes: int = 1 << 30) -> dict[str, float]:
    """Bytes a second of this rank's host and device copies, in one thread each; median of 5."""
    host = torch.ones(size_bytes, dtype=torch.uint8)
    other = torch.ones(size_bytes, dtype=torch.uint8)
    found = {"host to host": _rate(lambda: other.copy_(host), size_bytes)}
    if not torch.cuda.is_available():
        return found
    device = torch.ones(size_bytes, dtype=torch.uint8, device="cuda")
    pinned = torch.ones(size_bytes, dtype=torch.uint8, pin_memory=True)
    found["device to pinned host"] = _rate(lambda: pinned.copy_(device), size_bytes)
    found["device to pageable host"] = _rate(lambda: host.copy_(device), size_bytes)
    found["pinned host to device"] = _rate(lambda: device.copy_(pinned), size_bytes)
    found["pageable host to device"] = _rate(lambda: device.copy_(host), size_bytes)
    return found


def release_pinned() -> None:
    """Give back the pinned memory that torch keeps for later; nothing where it cannot."""
    names = ("_host_emptyCache", "_accelerator_emptyHostCache")
    empty = next((getattr(torch._C, name) for name in names if hasattr(torch._C, name)), None)
    if empty is not None and torch.backends.cuda.is_built():
        empty()


def _rate(work: Callable[[], Any], size_bytes: int) -> float:
    seconds = []
    for _ in range(5):
        torch.distributed.barrier()
        began = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return size_bytes / sorted(seconds)[2]


def prefault(size_bytes: int) -> float:
    """Touch memory once and give it back; seconds. Virtual machines may grow only when touched."""
    began = time.perf_counter()
    step = 4 << 30
    held = [torch.ones(step, dtype=torch.uint8) for _ in range(max(0, size_bytes) // step)]
    del held
    return time.perf_counter() - began

"""What a benchmark needs of host memory, from the sizes alone, so that it is known beforehand.

Bytes a parameter, of all ranks together, P parameters; checked against the peaks that were
measured on two H200 (benchmarks/results/h200*.json):

    12      states on the host: float32 master and two moments (HybridDeviceOptimizer; else 0)
     4 up   its float32 gradients in pinned memory, where each tensor takes the next power of two
    14      the files, where they are in memory (/dev/shm): states and bfloat16 weights

    stock fully_reshardable    30 on each rank while building, or 23 on each rank beside the files
    stock dp_reshardable       files, states on the host once more up to 2/3, and a pinned copy of
                               what is on the device
    vime_optim                 files

With HybridDeviceOptimizer and two ranks these are 76 to 80, 44 to 48 and 30 to 34, and 3 GB a
rank for the process. On the simulated device its memory is host memory too.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks.report import DP, FULLY
from benchmarks.state import BACKENDS, SIZES, Size

FILE_BYTES = 14
_STATE_BYTES = 12
_WEIGHT_BYTES = 2
_GRADIENT_BYTES = 4
_FULLY_BUILD_BYTES = 30
_FULLY_REST_BYTES = 23
#: Of the states on the host, what stock holds once more while it loads dp_reshardable.
_DP_LOAD_SHARE = 2 / 3
#: Pinned memory of the stock writer over the tensors in it, as its blocks are powers of two.
_PINNED_SHARE = 1.4
_PROCESS_BYTES = {"cuda": 3 * 10**9, "cpu": 10**9}


def tensor_numels(size: Size) -> list[int]:
    """Elements of every parameter of the model that state.build makes."""
    hidden, ffn = size.hidden, size.ffn
    layer = [3 * hidden * hidden, hidden * hidden, 2 * ffn * hidden, ffn * hidden, hidden, hidden]
    return layer * size.layers + [size.vocab * hidden, size.vocab * hidden, hidden]


def parameters(size: str) -> int:
    return sum(tensor_numels(SIZES[size]))


def host_bytes(size: str, backend: str, variant: str, ranks: int, device: str) -> int:
    """Host memory at the peak of a turn, all ranks together, files in memory included."""
    count = parameters(size)
    on_host = BACKENDS[backend].offload_fraction
    states = _STATE_BYTES * count
    gradients = sum(_power_of_two(_GRADIENT_BYTES * numel) for numel in tensor_numels(SIZES[size]))
    base = on_host * (states + gradients) + ranks * _PROCESS_BYTES[device]
    if device == "cpu":
        base += (1 - on_host) * states + ranks * (_WEIGHT_BYTES + _GRADIENT_BYTES) * count
    extra = float(FILE_BYTES * count)
    if variant == FULLY:
        extra = max(_FULLY_BUILD_BYTES * ranks, FILE_BYTES + _FULLY_REST_BYTES * ranks) * count
    elif variant == DP:
        on_device = _WEIGHT_BYTES * count + (1 - on_host) * states
        extra += _DP_LOAD_SHARE * on_host * states + _PINNED_SHARE * on_device
    return int(base + extra)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def available_bytes() -> int:
    """Memory that can be had: MemAvailable, or what the control group leaves where that is less."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    free = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        most = int((group / "memory.max").read_text())
        free = min(free, most - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # no control group, or no limit ("max")
        pass
    return free


def problem(
    size: str,
    backend: str,
    variant: str,
    *,
    ranks: int,
    device: str,
    folder: Path,
    free_bytes: int | None = None,
) -> str | None:
    """Why a variant cannot be measured here, None when it fits."""
    needed = host_bytes(size, backend, variant, ranks, device)
    free = available_bytes() if free_bytes is None else free_bytes
    if needed > free:
        return f"needs about {needed / 1e9:.0f} GB of host memory, {free / 1e9:.0f} GB are free"
    files = FILE_BYTES * parameters(size)
    room = shutil.disk_usage(folder).free
    if files > room:
        return f"writes {files / 1e9:.0f} GB, {folder} has {room / 1e9:.0f} GB left"
    return None

"""Loads of directories with flipped bits, and what comparing digests costs a load."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import torch


def _trainer(numel: int) -> Any:
    from tests.writer.scenarios import Trainer

    trainer = Trainer(numel, sharding="fully_reshardable")
    trainer.step()
    return trainer


def flips(root: str, count: int, verify: str = "read", seed: int = 1) -> list[Any]:
    """Flip one bit of a data file, load, and put it back, `count` times.

    Returns:
        For each: the file, the place, what was raised and what it says, and whether all that was
        loaded is as it was saved.
    """
    from tests.writer.readback import same_bits, snapshot
    from vime_optim import settings

    trainer = _trainer(4096)
    folder, _ = trainer.save(root, is_async=False)
    settings.activate(settings.Settings(verify=verify))
    right = snapshot(trainer.state())
    files = sorted(folder.glob("*.distcp"))
    draw = random.Random(seed)  # the same on every rank
    found = []
    for _ in range(count):
        path = draw.choice(files)
        position, bit = draw.randrange(path.stat().st_size), draw.randrange(8)
        trainer.step()  # what is loaded differs from what is there
        torch.distributed.barrier()
        _flip(path, position, bit)
        outcome: dict[str, Any] = {"file": path.name, "position": position, "type": None}
        try:
            trainer.load(folder)
        except Exception as error:
            outcome |= {"type": type(error).__name__, "text": str(error)}
        torch.distributed.barrier()
        _flip(path, position, bit)
        after = snapshot(trainer.state()) if outcome["type"] is None else {}
        outcome["exact"] = all(same_bits(right[key], value) for key, value in after.items())
        found.append(outcome)
        trainer.load(folder)
    return found


def _flip(path: Path, position: int, bit: int) -> None:
    """On rank 0, in place."""
    from tests.writer.scenarios import rank

    if rank() == 0:
        with path.open("r+b") as file:
            file.seek(position)
            [byte] = file.read(1)
            file.seek(position)
            file.write(bytes([byte ^ 1 << bit]))
    torch.distributed.barrier()


def load_cost(root: str, numel: int, turns: int, cold: bool) -> dict[str, Any]:
    """Seconds of whole loads without and with digests, in turn; and the bytes of the files.

    Args:
        cold: the files are not in memory when a load begins.
    """
    from vime_optim import settings

    trainer = _trainer(numel)
    folder, _ = trainer.save(root, is_async=False)
    seconds: dict[str, list[float]] = {"off": [], "read": []}
    for turn in range(turns + 1):
        for verify in ("off", "read") if turn % 2 else ("read", "off"):
            settings.activate(settings.Settings(verify=verify))
            template = trainer.state(is_loading=True)
            torch.distributed.barrier()
            for path in folder.iterdir() if cold else ():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            torch.distributed.barrier()
            began = time.perf_counter()
            trainer.load(folder, template)
            torch.distributed.barrier()
            seconds[verify].append(time.perf_counter() - began)
    return {
        "bytes": sum(path.stat().st_size for path in folder.glob("*.distcp")),
        "off_s": seconds["off"][1:],
        "read_s": seconds["read"][1:],
    }

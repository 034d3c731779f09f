"""Async saves that overlap updates, in numbers: `python -m tests.writer.overlap --saves 1000`.

Units, room for copies and the writers' pace are drawn anew for each save; up to three are in flight
while the training goes on. Every finalized checkpoint is read back and compared bit by bit with
the values of the moment of its save.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from tests.writer.launch import launch, results, tree_of


def overlap(root: str, saves: int, seed: int) -> dict[str, Any]:
    """The scenario: what this rank found, and how often updates copied or waited."""
    from tests.writer.scenarios import Trainer, _counters, _use, check, rank
    from vime_optim.files.fastfile import DigestingFile

    draw = random.Random(seed)  # the same on every rank
    pace = random.Random(seed + 1 + rank())
    real = DigestingFile.write_vector

    def write_vector(self: Any, views: Any) -> None:
        time.sleep(pace.choice((0.0, 0.0, 0.002, 0.01)))
        real(self, views)

    DigestingFile.write_vector = write_vector  # type: ignore[method-assign]
    wrong: list[str] = []
    done = 0
    asked: dict[int, Any] = {}
    before = Counter(_counters())
    trainer: Any = None
    try:
        for number in range(saves):
            if number % 50 == 0:
                if trainer is not None:
                    done += _check(trainer, asked, wrong, check, blocking=True)
                trainer = Trainer(
                    draw.choice((4096, 20000)),
                    persistent=draw.random() < 0.5,
                    hybrid=draw.random() < 0.6,
                )
                trainer.step()
            _use(
                "guard",
                draw.choice((0, 1 << 16, 1 << 30)),
                draw.choice((1 << 12, 1 << 14, 1 << 16, 32 << 20)),
            )
            saved = trainer.save(Path(root) / f"{number}")
            asked[trainer.queue.call_idx] = saved
            for _ in range(draw.randrange(1, 4)):
                trainer.step()
            limit = len(trainer.queue.async_calls) >= 3
            done += _check(trainer, asked, wrong, check, blocking=limit)
        done += _check(trainer, asked, wrong, check, blocking=True)
    finally:
        DigestingFile.write_vector = real  # type: ignore[method-assign]
    counted = Counter(_counters()) - before
    return {"done": done, "wrong": wrong, "counters": dict(counted)}


def _check(trainer: Any, asked: Any, wrong: list[str], check: Any, *, blocking: bool) -> int:
    finalized = trainer.finalize(blocking)
    for index in finalized:
        directory, expected = asked.pop(index)
        wrong += [f"{directory.parent.name}: {key}" for key in check(directory, expected)]
        torch.distributed.barrier()
        shutil.rmtree(directory.parent, ignore_errors=True)
    return len(finalized)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--saves", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--megatron", default="0.19.2")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vime_optim_overlap_") as root:
        values = {"root": root, "saves": arguments.saves, "seed": arguments.seed}
        ranks = results(
            launch(tree_of(arguments.megatron), "overlap", arguments=values, timeout_s=3600)
        )
    for number, outcome in enumerate(ranks):
        print(f"rank {number}: {outcome}")
    print(f"{time.monotonic() - began:.0f} s, load {os.getloadavg()[0]:.0f}")
    sys.exit(any(o["wrong"] or o["done"] != arguments.saves for o in ranks))


if __name__ == "__main__":
    main()

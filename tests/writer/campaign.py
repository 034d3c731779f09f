"""Failures, kills and bit flips in numbers: `python -m tests.writer.campaign --megatron 0.16.1`.

Failures: of a rank's writers, by an I/O error at a random moment of an async save. Kills: of a
rank, by SIGKILL at random moments of async and sync saves. Afterwards every directory is either
exact, chunk by chunk, or refused by the load check. Flips: random bits and cuts in a checkpoint
that was really saved; each has to be named with its file and range.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import signal
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from tests.writer.launch import launch, results, tree_of


def fail_writers(root: str, points: int, seed: int) -> list[str]:
    """On every rank: a random rank's writers fail at a random moment, `points` times."""
    from tests.writer.failures import caught
    from tests.writer.scenarios import Trainer, check, gathered, rank
    from vime_optim.async_save import units
    from vime_optim.commit.load_check import look
    from vime_optim.files.fastfile import DigestingFile

    draw = random.Random(seed)  # the same on every rank
    real = DigestingFile.write_vector
    units.UNIT_BYTES = 1 << 14
    found = []
    for point in range(points):
        trainer = Trainer(1 << 18, persistent=point % 4 == 3)
        trainer.step()
        left = [draw.randrange(400)] * (rank() == draw.randrange(2))

        def write_vector(self: Any, views: Any, left: list[int] = left) -> None:
            if left:
                left[0] -= 1
                if left[0] < 0:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            real(self, views)

        DigestingFile.write_vector = write_vector  # type: ignore[method-assign]
        directory, expected = trainer.save(Path(root) / f"point{point}")
        trainer.step()
        raised = caught(trainer.finalize)
        kinds = set(gathered(raised["type"]))
        torch.distributed.barrier()
        reason = look(str(directory))[0]
        if kinds == {None} and reason is None:
            found.append("wrong" if check(directory, expected) else "exact")
        elif kinds == {"WriterError"} and reason is not None and raised["seconds"] < 60:
            found.append("raised on every rank, load refused")
        else:
            found.append(f"BAD: {kinds}, load: {reason}, {raised['seconds']:.1f} s")
    DigestingFile.write_vector = real  # type: ignore[method-assign]
    return found


def kill_rank(root: str, delay_s: float, is_async: bool, persistent: bool) -> None:
    """Rank 1 dies `delay_s` into a series of saves; each save's truth is written down first."""
    from tests.writer.readback import snapshot
    from tests.writer.scenarios import Trainer, rank

    # Megatron pads buckets with uninitialised memory; this makes it alike in all builds.
    torch.use_deterministic_algorithms(True, warn_only=True)
    trainer = Trainer(1 << 18, persistent=persistent)
    trainer.step()
    if rank() == 1:
        threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for _ in range(4):
        truth = Path(root) / f"truth_{trainer.iteration:07d}_{rank()}.pt"
        torch.save(snapshot(trainer.state()), truth)
        trainer.save(root, is_async=is_async)
        trainer.step()
        trainer.finalize()


def judge_directories(root: Path) -> Counter[str]:
    from tests.writer.readback import differences
    from vime_optim.commit.load_check import look

    found: Counter[str] = Counter()
    for directory in sorted(root.glob("iter_*")):
        if look(str(directory))[0] is not None or not (directory / "metadata.json").exists():
            found["refused"] += 1
            continue
        number = directory.name.removeprefix("iter_")
        wrong = [
            key
            for path in root.glob(f"truth_{number}_*.pt")
            for key in differences(directory, torch.load(path, weights_only=True))
        ]
        found["WRONG" if wrong else "exact"] += 1
    return found


def kill_ranks(tree: Path, points: int, seed: int) -> Counter[str]:
    draw = random.Random(seed)
    found: Counter[str] = Counter()
    for point in range(points):
        with tempfile.TemporaryDirectory() as root:
            arguments = {
                "root": root,
                "delay_s": draw.uniform(0, 1.0),
                "is_async": point % 3 != 0,
                "persistent": point % 3 == 2,
            }
            outcomes = launch(tree, "kill_rank", world=2, arguments=arguments, timeout_s=150)
            found["launches"] += 1
            found["survivors that raised"] += sum("error" in outcome for outcome in outcomes)
            found += judge_directories(Path(root))
    return found


def flip_bits(tree: Path, count: int, seed: int) -> Counter[str]:
    """Flip or cut `count` times in one saved checkpoint, each on its own."""
    from vime_optim.files.manifest import verify_directory

    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as root:
        cases = {"root": root, "cases": [{"rounds": 1, "persistent": False, "numel": 4096}]}
        results(launch(tree, "exact", world=2, arguments=cases))
        [directory] = Path(root).glob("*/iter_*")
        draw = random.Random(seed)
        files = sorted(p for p in directory.iterdir() if p.stat().st_size)
        for _ in range(count):
            path = draw.choice(files)
            original = path.read_bytes()
            position = draw.randrange(len(original))
            cut = draw.random() < 0.1
            changed = bytearray(original[:position] if cut else original)
            if not cut:
                changed[position] ^= 1 << draw.randrange(8)
            path.write_bytes(bytes(changed))
            kind = f"{'cut' if cut else 'flip'} in {path.suffix or path.name}"
            found[f"{kind}: {_named(directory, path, position, verify_directory)}"] += 1
            path.write_bytes(original)
    return found


def _named(directory: Path, path: Path, position: int, verify: Any) -> str:
    from vime_optim.errors import CheckpointError
    from vime_optim.files.manifest import MANIFEST_NAME

    try:
        problems = verify(directory).problems
    except CheckpointError:
        return "named" if path.name == MANIFEST_NAME else "WRONG FILE"
    hits = [p for p in problems if p.file == path.name and p.start <= position < max(p.end, 1)]
    if not problems:
        return "MISSED"
    return "named" if hits and {p.file for p in problems} == {path.name} else "WRONG PLACE"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megatron", default="0.16.1")
    parser.add_argument("--writer-failures", type=int, default=20)
    parser.add_argument("--rank-kills", type=int, default=10)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    tree = tree_of(given.megatron)
    with tempfile.TemporaryDirectory() as root:
        arguments = {"root": root, "points": given.writer_failures, "seed": given.seed}
        failed = results(launch(tree, "fail_writers", arguments=arguments, timeout_s=300))[0]
    print("writers that failed:", json.dumps(Counter(failed)), flush=True)
    print("flips:", json.dumps(flip_bits(tree, given.flips, given.seed), indent=1), flush=True)
    print("ranks killed:", json.dumps(kill_ranks(tree, given.rank_kills, given.seed)), flush=True)


if __name__ == "__main__":
    main()

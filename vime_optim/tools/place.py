"""What a path is: a checkpoint, a root that names its latest one, or something else, in words."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NoReturn

from vime_optim.errors import CheckpointError

LATEST = "latest_checkpointed_iteration.txt"
_LATEST_BYTES = 64
_NAMES = 2000
"""Entries of a directory that are looked at to tell what it is."""


def checkpoint_directory(path: str | os.PathLike[str]) -> Path:
    """The directory of one checkpoint: `path` itself, or what its latest_... file names.

    Raises:
        CheckpointError: nothing is there, it is a file, or the file names no save.
    """
    place = Path(path)
    if place.is_dir():
        latest = place / LATEST
        return _follow(place) if not (place / ".metadata").exists() and latest.exists() else place
    if not place.exists():
        _refuse(place, "There is nothing at this path: no checkpoint directory.")
    if place.suffix in (".distcp", ".pt") or place.name == ".metadata":
        _refuse(
            place,
            "This is one file of a checkpoint, not its directory.",
            next_step=f"Give the directory: {place.parent}",
        )
    _refuse(place, "This is a file, not a checkpoint directory.")


def _follow(root: Path) -> Path:
    """Megatron's `--save` folder: the file holds a step, or `release`."""
    descriptor = os.open(root / LATEST, os.O_RDONLY | os.O_NONBLOCK)
    try:
        word = os.read(descriptor, _LATEST_BYTES).decode("ascii", "replace").strip()
    finally:
        os.close(descriptor)
    known = re.fullmatch(r"\d{1,12}", word)
    target = root / (f"iter_{int(word):07d}" if known else "release")
    if (known or word == "release") and target.is_dir():
        return target
    _refuse(
        root,
        f"{LATEST} names a save that is not there.",
        got=ascii(word)[1:-1] or "an empty file",
        expected=target.name if known else "a step whose iter_XXXXXXX directory is there",
        next_step="Give one of the iter_XXXXXXX directories inside.",
    )


def describe(place: Path) -> tuple[str, str]:
    """What a directory without `.metadata` is, and what to do with it."""
    names = sorted(entry.name for entry in place.iterdir())[:_NAMES]
    finished = "Give the iter_XXXXXXX directory of a finished save."
    if not names:
        return "an empty directory", finished
    if "state.safetensors.index.json" in names:
        return "an export of `vime-optim export`", "`vime-optim import` makes a checkpoint of it."
    weights = [name for name in names if name.endswith((".safetensors", ".bin"))]
    if weights and "config.json" in names:
        return (
            "a Hugging Face model directory: safetensors weights without optimizer state",
            "Convert it with your framework's converter; these tools read Megatron's checkpoints.",
        )
    if weights:
        return "safetensors or .bin weights, no Megatron checkpoint", finished
    if any(name.endswith(".distcp") for name in names):
        return ".distcp files without .metadata: the save did not finish", finished
    if any(re.fullmatch(r"mp_rank_\d+.*", name) for name in names):
        return (
            "a checkpoint of --ckpt-format torch (mp_rank_XX folders)",
            "Load it with Megatron and save it with --ckpt-format torch_dist.",
        )
    if any(name.startswith("iter_") for name in names):
        found = ", ".join(ascii(name)[1:-1] for name in names[:4])
        return f"a directory of checkpoints: {found}", "Give one of the directories inside."
    return "files such as " + ", ".join(ascii(name)[1:-1] for name in names[:4]), finished


def refuse_plain_dcp(place: Path) -> NoReturn:
    """For `.metadata` that holds no common state of Megatron and has none beside it."""
    _refuse(
        place,
        "This is a plain torch.distributed.checkpoint directory, not a checkpoint of Megatron.",
        got=".metadata, and neither metadata.json nor a common state",
        expected="a save of megatron.core.dist_checkpointing (--ckpt-format torch_dist)",
        next_step="Read it with torch.distributed.checkpoint, by the program that wrote it.",
    )


def _refuse(
    place: Path,
    what: str,
    *,
    got: str | None = None,
    expected: str | None = None,
    next_step: str = "Give the iter_XXXXXXX directory that holds .metadata.",
) -> NoReturn:
    raise CheckpointError(what, where=str(place), got=got, expected=expected, next_step=next_step)

"""Refuses a directory that is not a complete, unmixed checkpoint, before a load changes anything.

DCP reads straight into the parameters, so an error in the middle of a load leaves a model that is
half the old and half the new one. What can be known beforehand is looked at beforehand: the files
that Megatron writes last, each file's size and stamp, and with VIME_OPTIM_VERIFY=1 every byte.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from vime_optim import installer, settings
from vime_optim.errors import CheckpointError
from vime_optim.writer.agreement import agree, describe
from vime_optim.writer.manifest import (
    MANIFEST_NAME,
    Manifest,
    Problem,
    check_entry,
    read_manifest,
    verify_entry,
)

_REFUSED = "this checkpoint is refused, nothing was changed"
_NEXT = "load an older checkpoint; `vime-optim inspect` shows what is in this one"
_SMALL = (".metadata", "common.pt", "metadata.json")


def check_before_load(directory: str, *, collective: bool = True) -> None:
    """Raise on every rank when `directory` cannot be loaded as a whole.

    Args:
        directory: the checkpoint directory.
        collective: all ranks call this, and share the work of reading; else this process
            checks everything by itself.

    Raises:
        CheckpointError: the directory is unfinished, or a file is missing, cut, mixed up or
            (VIME_OPTIM_VERIFY=1) damaged.
    """
    collective = collective and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if collective else 0
    share = torch.distributed.get_world_size() if collective else 1
    error: str | None = None
    try:
        error = find_reason(directory, rank, share)
    except (OSError, CheckpointError) as caught:
        got = getattr(caught, "got", None)
        error = describe(caught) + (f": {got}" if got else "")
    if collective:
        agree(error, _REFUSED, directory, kind=CheckpointError, next_step=_NEXT)
    elif error is not None:
        raise CheckpointError(_REFUSED, where=directory, got=error, next_step=_NEXT)


def find_reason(directory: str, part: int = 0, parts: int = 1) -> str | None:
    """Why a directory cannot be loaded, None when nothing speaks against it.

    Args:
        part, parts: look at every `parts`-th file, beginning with number `part`.
    """
    reason = unfinished(directory)
    if reason is not None:
        return reason
    manifest = read_manifest(directory)
    if manifest is None:
        if settings.current().verify and part == 0:
            installer.counters["loads that had no manifest to verify"] += 1
        return None
    problems = _problems(directory, manifest, part, parts)
    if not problems:
        return None
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{problems[0]}{more}{_hint(problems)}"


def _problems(directory: str, manifest: Manifest, part: int, parts: int) -> list[Problem]:
    deep = settings.current().verify
    problems: list[Problem] = []
    for number, (name, entry) in enumerate(sorted(manifest.entries.items())):
        if number % parts != part:
            continue
        if deep or name in _SMALL:
            problems += verify_entry(directory, entry, manifest.chunk_bytes)
        else:
            problems += check_entry(directory, entry)
    if deep:
        installer.counters["loads verified by digests"] += 1
    return problems


def _hint(problems: list[Problem]) -> str:
    if any(problem.file in _SMALL for problem in problems):
        return (
            f"; if a tool without vime_optim rewrote this directory on purpose, delete"
            f" {MANIFEST_NAME}"
        )
    return ""


def unfinished(directory: str) -> str | None:
    """Why the save of a directory did not finish; None when it did, or is no checkpoint at all.

    A directory that does not exist or holds nothing of a distributed checkpoint is left to
    Megatron's own errors.
    """
    path = Path(directory)
    if not path.is_dir():
        return None
    config = path / "metadata.json"
    if not config.is_file():
        began = any(name.endswith(".distcp") or name == "common.pt" for name in os.listdir(path))
        if not began:
            return None
        return "its save did not finish: metadata.json, which is written last, is missing"
    try:
        backend = json.loads(config.read_text()).get("sharded_backend")
    except (ValueError, AttributeError):
        return "metadata.json is damaged"
    if backend == "torch_dist" and not (path / ".metadata").is_file():
        return "its save did not finish: .metadata is missing"
    return None

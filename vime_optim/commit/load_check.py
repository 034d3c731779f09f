"""Refuses a directory that is not a complete, unmixed checkpoint, before a load changes anything.

DCP reads straight into the parameters, so an error in the middle of a load leaves a model that is
half the old and half the new one. What can be known beforehand is looked at beforehand: the files
that Megatron writes last, each file's size and stamp, and with VIME_OPTIM_VERIFY=1 every byte.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from vime_optim import settings
from vime_optim.commit.agreement import agree, describe
from vime_optim.counters import counters
from vime_optim.errors import CheckpointError, VimeOptimError, one_line
from vime_optim.files.dcp_metadata import load_metadata
from vime_optim.files.manifest import (
    MANIFEST_MARK,
    MANIFEST_NAME,
    Manifest,
    Problem,
    check_entry,
    read_manifest,
    verify_entries,
)
from vime_optim.files.plain import read_plain

_REFUSED = "this checkpoint is refused, nothing was changed"
_thread = threading.local()
_FAILED = "this checkpoint could not be loaded"
_NEXT = "load an older checkpoint; `vime-optim inspect` shows what is in this one"
_CONFIG_LIMIT_BYTES = 1 << 20
_METADATA_LIMIT_BYTES = 1 << 30
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
        error = describe(caught)
    if collective:
        agree(error, _REFUSED, directory, kind=CheckpointError, next_step=_NEXT)
    elif error is not None:
        raise CheckpointError(_REFUSED, where=directory, got=error, next_step=_NEXT)


@contextlib.contextmanager
def errors_of_ours(directory: str) -> Iterator[None]:
    """torch's exceptions become ours, with the cause in a line.

    CheckpointException is a BaseException, which `except Exception` misses; UnpicklingError advises
    to switch weights_only off, which would run the file's code.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    _thread.cause = None
    try:
        yield
    except CheckpointException as error:
        causes = {rank: cause for rank, (cause, _) in error.failures.items()}
        first = next(iter(causes.values()), None)
        lines = [f"rank {rank}: {_in_a_line(cause, directory)}" for rank, cause in causes.items()]
        got = "; ".join(lines[:8])
        next_step = first.next_step if isinstance(first, VimeOptimError) else _NEXT
        raise CheckpointError(_FAILED, where=directory, got=got, next_step=next_step) from None
    except pickle.UnpicklingError as error:
        got = _in_a_line(error)
        raise CheckpointError(_FAILED, where=directory, got=got, next_step=_NEXT) from None


def note_cause(error: VimeOptimError) -> None:
    """Why this thread could not read the metadata, which DCP passes over: it then finds none."""
    _thread.cause = error


def _in_a_line(error: BaseException, directory: str = "") -> str:
    """What an exception says, without advice."""
    if isinstance(error, AssertionError) and str(error).startswith("metadata is None"):
        error = getattr(_thread, "cause", None) or error
    if isinstance(error, KeyError) and directory and _has_no_optimizer(directory):
        return "no optimizer state is in this checkpoint: it was saved without (--no-save-optim)"
    if isinstance(error, VimeOptimError):
        details = [
            f"{name} {value}" for name in ("got", "expected") if (value := getattr(error, name))
        ]
        return "; ".join([describe(error), *details])
    return one_line(error)


def _has_no_optimizer(directory: str) -> bool:
    try:
        metadata = load_metadata(read_plain(Path(directory) / ".metadata", _METADATA_LIMIT_BYTES))
    except (OSError, CheckpointError):
        return False
    return not any("optimizer" in key for key in metadata.state_dict_metadata)


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
        return _without_manifest(directory) if part == 0 else None
    problems = _problems(directory, manifest, part, parts)
    if not problems:
        return None
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{problems[0]}{more}{_hint(problems)}"


def _without_manifest(directory: str) -> str | None:
    """What is wrong with having none: VIME_OPTIM_VERIFY=1 promises a check that needs one, and a
    checkpoint that was written with one has lost it."""
    metadata = Path(directory) / ".metadata"
    if not metadata.exists():
        return None  # no checkpoint of this format, which Megatron says better
    if MANIFEST_MARK.encode() in read_plain(metadata, _METADATA_LIMIT_BYTES):
        return (
            f"{MANIFEST_NAME} is gone, which was written with it: files may be lost or mixed; copy"
            " it from where this copy was made, or make one without it by `vime-optim repair`"
        )
    if settings.current().verify:
        return (
            f"VIME_OPTIM_VERIFY=1 asks for a check of every byte, and there is no {MANIFEST_NAME},"
            " as another tool wrote this checkpoint; set VIME_OPTIM_VERIFY=0 to load it unchecked"
        )
    return None


def _problems(directory: str, manifest: Manifest, part: int, parts: int) -> list[Problem]:
    entries = [entry for _, entry in sorted(manifest.entries.items())]
    if settings.current().verify:
        counters["loads verified by digests"] += 1
        return verify_entries(directory, entries, manifest.chunk_bytes, part, parts)
    problems: list[Problem] = []
    for entry in entries[part::parts]:
        if entry.record.name in _SMALL:
            problems += verify_entries(directory, [entry], manifest.chunk_bytes)
        else:
            problems += check_entry(directory, entry)
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
    if not config.exists():
        began = any(name.endswith(".distcp") or name == "common.pt" for name in os.listdir(path))
        if not began:
            return None
        return "its save did not finish: metadata.json, which is written last, is missing"
    try:
        backend = json.loads(read_plain(config, _CONFIG_LIMIT_BYTES)).get("sharded_backend")
    except (ValueError, AttributeError, RecursionError):
        return "metadata.json is damaged"
    if backend == "torch_dist" and not (path / ".metadata").is_file():
        return "its save did not finish: .metadata is missing"
    return None

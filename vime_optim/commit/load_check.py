"""Refuses a directory that is not a complete, unmixed checkpoint, before a load changes anything.

DCP reads straight into the parameters, so an error in the middle of a load leaves a model that is
half the old and half the new one. What can be known beforehand is looked at beforehand: the files
that Megatron writes last, each file's size and stamp, and with VIME_OPTIM_VERIFY=all every byte.
With VIME_OPTIM_VERIFY=read what was read is compared with its digests afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import xxhash

from vime_optim import collectives, settings
from vime_optim.commit.agreement import agree, describe, point
from vime_optim.counters import counters
from vime_optim.errors import CheckpointError, VimeOptimError, one_line, rebuild
from vime_optim.files.checked import ChunksRead
from vime_optim.files.dcp_metadata import load_metadata
from vime_optim.files.manifest import (
    MANIFEST_MARK,
    MANIFEST_NAME,
    Manifest,
    Problem,
    check_file,
    read_manifest,
    verify_chunks,
    verify_files,
)
from vime_optim.files.plain import read_plain

_REFUSED = "this checkpoint is refused, nothing was changed"
_thread = threading.local()
_FAILED = "this checkpoint could not be loaded"
_NEXT = "load an older checkpoint; `vime-optim inspect` shows what is in this one"
_CONFIG_LIMIT_BYTES = 1 << 20
_METADATA_LIMIT_BYTES = 1 << 30
_SMALL = (".metadata", "common.pt", "metadata.json")
_LEAST_CHUNK_BYTES = 1 << 16

COMPARED = "bytes of checkpoint files compared with their digests"


def check_before_load(directory: str, *, collective: bool = True) -> Comparison:
    """Raise on every rank when `directory` cannot be loaded as a whole.

    Args:
        directory: the checkpoint directory.
        collective: all ranks call this, and share the work of reading; else this process
            checks everything by itself.

    Returns:
        What is compared when the load has read.

    Raises:
        CheckpointError: the directory is unfinished, or a file is missing, cut, mixed up or
            (VIME_OPTIM_VERIFY=all) damaged.
    """
    collective = collective and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if collective else 0
    share = torch.distributed.get_world_size() if collective else 1
    error: str | None = None
    comparison = Comparison(directory, None)
    try:
        error, manifest = look(directory, rank, share)
        if settings.current().verify == "read":
            comparison = Comparison(directory, manifest)
    except (OSError, CheckpointError) as caught:
        error = describe(caught)
    if collective:
        values = [comparison.mark]
        [total] = agree(error, _REFUSED, directory, None, CheckpointError, _NEXT, values)
        # Ranks with other settings, or an old directory in a cache: each for itself.
        comparison.is_shared = (total - share * comparison.mark) % (1 << 64) == 0
    elif error is not None:
        raise CheckpointError(_REFUSED, where=directory, got=error, next_step=_NEXT)
    return comparison


class Comparison:
    """What a load compares with the digests of its checkpoint.

    Attributes:
        chunks: what it reads; None where nothing is compared: there is no manifest, it is not asked
            for, or chunks are so small that a lying manifest asks for many reads of large ones.
        mark: tells ranks that compare the same from others.
        is_shared: all ranks load, and compare the same.
    """

    def __init__(self, directory: str, manifest: Manifest | None) -> None:
        if manifest is not None and manifest.chunk_bytes < _LEAST_CHUNK_BYTES:
            manifest = None
        self._directory, self._manifest = directory, manifest
        self.chunks = None if manifest is None else ChunksRead(directory, manifest)
        self.mark = 0 if manifest is None else xxhash.xxh3_64_intdigest(manifest.save_id.encode())
        self.is_shared = False

    def finish(self) -> None:
        """At the end of the load: compare each chunk that any rank has read from.

        Raises:
            CheckpointError: a chunk is not what was written.
        """
        if self._manifest is None or self.chunks is None:
            return
        flags, rank, ranks = self.chunks.flags, 0, 1
        if self.is_shared:
            point()  # all have read, and all come to the next collective
            shared = torch.from_numpy(flags).to(collectives.device_of())
            torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX)
            flags = shared.cpu().numpy()
            rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        chunks, chunk_bytes = self._manifest.chunks, self._manifest.chunk_bytes
        used = [chunks[number] for number in np.flatnonzero(flags)]
        for record, number in used:
            counters[COMPARED] += min(chunk_bytes, record.size_bytes - number * chunk_bytes)
        for problem in verify_chunks(self._directory, used[rank::ranks], chunk_bytes):
            raise CheckpointError(
                "the bytes of a checkpoint file are not those that were written (digest differs)",
                where=os.path.join(self._directory, problem.file),
                got=problem.place,
                next_step="copy this file again from its source, or load an older checkpoint",
            )


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


@contextlib.contextmanager
def that_callers_catch() -> Iterator[None]:
    """A CheckpointError that leaves a load is Megatron's CheckpointingException too, which its
    callers expect of a load."""
    try:
        yield
    except CheckpointError as error:
        error.__class__ = _caught_as_megatrons()
        raise


@functools.cache
def _caught_as_megatrons() -> type[CheckpointError]:
    from megatron.core.dist_checkpointing.core import CheckpointingException

    class Both(CheckpointError, CheckpointingException):  # type: ignore[misc]
        def __reduce__(self) -> tuple[object, ...]:  # another process may have no Megatron
            return (rebuild, (CheckpointError, dict(self.__dict__)))

    Both.__name__, Both.__qualname__ = CheckpointError.__name__, CheckpointError.__qualname__
    Both.__module__ = CheckpointError.__module__
    return Both


def note_cause(error: VimeOptimError) -> None:
    """Why this thread could not read the metadata, which DCP passes over: it then finds none."""
    _thread.cause = error


def _in_a_line(error: BaseException, directory: str = "") -> str:
    """What an exception says, without advice."""
    if isinstance(error, AssertionError) and str(error).startswith("metadata is None"):
        error = getattr(_thread, "cause", None) or error
    asks_for_it = isinstance(error, KeyError) and "optimizer" in str(error)
    if asks_for_it and directory and _has_no_optimizer(directory):
        return "no optimizer state is in this checkpoint: it was saved without (--no-save-optim)"
    if isinstance(error, VimeOptimError):
        expected = [f"expected {error.expected}"] if error.expected else []
        return "; ".join([describe(error), *expected])
    return one_line(error)


def _has_no_optimizer(directory: str) -> bool:
    try:
        metadata = load_metadata(read_plain(Path(directory) / ".metadata", _METADATA_LIMIT_BYTES))
    except (OSError, CheckpointError):
        return False
    return not any("optimizer" in key for key in metadata.state_dict_metadata)


def look(directory: str, part: int = 0, parts: int = 1) -> tuple[str | None, Manifest | None]:
    """Why a directory cannot be loaded, None when nothing speaks against it; and its manifest.

    Args:
        part, parts: look at every `parts`-th file, beginning with number `part`.
    """
    reason = unfinished(directory)
    if reason is not None:
        return reason, None
    manifest = read_manifest(directory)
    if manifest is None:
        return (_without_manifest(directory) if part == 0 else None), None
    return _reason_of(_problems(directory, manifest, part, parts)), manifest


def _reason_of(problems: list[Problem]) -> str | None:
    if not problems:
        return None
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{problems[0]}{more}{_hint(problems)}"


def _without_manifest(directory: str) -> str | None:
    """What is wrong with having none: VIME_OPTIM_VERIFY=all promises a check that needs one, and a
    checkpoint that was written with one has lost it."""
    metadata = Path(directory) / ".metadata"
    if not metadata.exists():
        return None  # no checkpoint of this format, which Megatron says better
    if MANIFEST_MARK.encode() in read_plain(metadata, _METADATA_LIMIT_BYTES):
        return (
            f"{MANIFEST_NAME} is gone, which was written with it: files may be lost or mixed; copy"
            " it from where this copy was made, or make one without it by `vime-optim repair`"
        )
    if settings.current().verify == "all":
        return (
            "VIME_OPTIM_VERIFY=all asks for a check of every byte, and there is no"
            f" {MANIFEST_NAME}, as another tool wrote this checkpoint; set VIME_OPTIM_VERIFY=read"
            " to load it unchecked"
        )
    return None


def _problems(directory: str, manifest: Manifest, part: int, parts: int) -> list[Problem]:
    records = [record for _, record in sorted(manifest.records.items())]
    if settings.current().verify == "all":
        counters["loads verified by digests"] += 1
        return verify_files(directory, records, manifest.chunk_bytes, part, parts)
    problems: list[Problem] = []
    for record in records[part::parts]:
        if record.name in _SMALL:
            problems += verify_files(directory, [record], manifest.chunk_bytes)
        else:
            problems += check_file(directory, record)
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

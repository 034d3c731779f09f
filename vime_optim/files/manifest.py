"""`vime_optim_manifest.json`: the size, stamp and digests of every file of a checkpoint.

It lies beside Megatron's files, and stock Megatron and torch do not look at it. The digests of the
`.distcp` files were computed while they were written; the small files that rank 0 writes
(`.metadata`, `common.pt`, `metadata.json`) are read once more for theirs.

Layout: {"format", "version", "chunk_bytes", "digest": "xxh3_64", "save_id", "files": {name:
{"size_bytes", "stamp", "chunks" (16 hex digits a chunk), "items": []}}, "check": xxh3-64 of all the
rest}. Earlier releases listed the items of each file, which `.metadata` tells too.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from vime_optim.errors import CheckpointError
from vime_optim.files.fastfile import CHUNK_BYTES, FileRecord, digest_file, digest_of, read_stamp
from vime_optim.files.plain import read_plain, write_whole
from vime_optim.files.reading import default_threads

MANIFEST_NAME = "vime_optim_manifest.json"
MANIFEST_MARK = "vime_optim_manifest"
"""Attribute of DCP's metadata that says that a manifest was written with it."""

_FORMAT = "vime_optim manifest"
_VERSION = 1
_MISSING = "the file is missing"
_NOT_PLAIN = "no plain file any more"
DIFFERS = "the bytes are not those that were written (digest differs)"
_LIMIT_BYTES = 1 << 30
_MOST_CHUNK_BYTES = 1 << 28


def keys_in(directory: str | os.PathLike[str], name: str, start: int, end: int) -> tuple[str, ...]:
    """What bytes [start, end) of a file hold, as `.metadata` says; nothing where it does not."""
    path = Path(directory) / ".metadata"
    try:
        held = _items_of(path, path.stat().st_mtime_ns).get(name, ())
    except (OSError, CheckpointError):
        return ()
    return tuple(key for first, last, key in held if first < end and last > start)


@functools.lru_cache(maxsize=1)
def _items_of(path: Path, changed_ns: int) -> dict[str, list[tuple[int, int, str]]]:
    """(first byte, end, key) of the items of each file, in file order. Damage is found piece by
    piece: `.metadata` is read once."""
    from vime_optim.files.dcp_metadata import load_metadata

    items: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for index, info in load_metadata(read_plain(path, _LIMIT_BYTES)).storage_data.items():
        key = index.fqn if index.offset is None else f"{index.fqn} at {list(index.offset)}"
        items[info.relative_path].append((info.offset, info.offset + info.length, key))
    for held in items.values():
        held.sort()
    return items


@dataclass
class Manifest:
    """What a complete checkpoint directory holds."""

    records: dict[str, FileRecord] = field(default_factory=dict)
    save_id: str = field(default_factory=lambda: secrets.token_hex(8))
    chunk_bytes: int = CHUNK_BYTES

    def add(self, record: FileRecord) -> None:
        self.records[record.name] = record

    def add_files(self, directory: str | os.PathLike[str], *names: str) -> None:
        """Add or renew files that something else wrote, those of them that are there."""
        for name in names:
            path = Path(directory) / name
            if path.is_file():
                self.add(digest_file(path, name, self.chunk_bytes))

    @property
    def chunks(self) -> list[tuple[FileRecord, int]]:
        """What digests cover: each a file's record, and the number of the chunk in the file."""
        return [(r, number) for r in self.records.values() for number in range(r.chunks)]

    def write(self, directory: str | os.PathLike[str]) -> None:
        """Write it whole or not at all, and bring it to stable storage."""
        body = self._body()
        text = json.dumps({**body, "check": _check_of(body)}, separators=(",", ":"))
        write_whole(Path(directory) / MANIFEST_NAME, text.encode())

    def _body(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "digest": "xxh3_64",
            "chunk_bytes": self.chunk_bytes,
            "save_id": self.save_id,
            "files": {
                name: {
                    "size_bytes": record.size_bytes,
                    "stamp": record.stamp,
                    "chunks": record.chunk_digests.hex(),
                    "items": [],  # wanted by earlier releases
                }
                for name, record in sorted(self.records.items())
            },
        }


def _check_of(body: dict[str, Any]) -> str:
    canonical = json.dumps(body, separators=(",", ":"), sort_keys=True)
    return xxhash.xxh3_64_hexdigest(canonical.encode())


def read_manifest(directory: str | os.PathLike[str]) -> Manifest | None:
    """The manifest of a checkpoint directory, None when it has none (stock wrote it).

    Raises:
        CheckpointError: the manifest itself is damaged, or of a later version.
    """
    path = Path(directory) / MANIFEST_NAME
    try:
        raw = read_plain(path, _LIMIT_BYTES)
    except FileNotFoundError:
        return None
    try:
        body = json.loads(raw.decode("utf-8"))
        check = body.pop("check")
        if body["format"] != _FORMAT or check != _check_of(body):
            raise ValueError("its own digest does not fit")
        if body["version"] > _VERSION:
            raise ValueError(f"version {body['version']} is newer than this vime_optim")
        manifest = Manifest({}, body["save_id"], _number(body["chunk_bytes"], _MOST_CHUNK_BYTES))
        if manifest.chunk_bytes == 0:
            raise ValueError("chunks of no bytes")
        if type(manifest.save_id) is not str:
            raise TypeError("the save's id")
        for name, values in sorted(body["files"].items()):
            manifest.add(_record_of(name, values, manifest.chunk_bytes))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            "the checkpoint's manifest is damaged",
            where=str(path),
            got=f"{type(error).__name__}: {error}"[:300],
            next_step="take another checkpoint; or delete this file to load without verification",
        ) from None
    return manifest


def _record_of(name: Any, values: Any, chunk_bytes: int) -> FileRecord:
    """The record of one file, held against itself: it may say anything."""
    if type(name) is not str or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"a file {name!r} outside of the directory")
    size_bytes = _number(values["size_bytes"])
    digests = bytes.fromhex(values["chunks"])
    if len(digests) != 8 * -(-size_bytes // chunk_bytes):
        raise ValueError(f"{len(digests) // 8} digests for {size_bytes} bytes of {name!r}")
    if type(values["stamp"]) is not str:
        raise TypeError(f"the stamp of {name!r}")
    return FileRecord(name, size_bytes, values["stamp"], digests)


def _number(value: Any, most: int = 1 << 62) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{str(value)[:50]!r} where a number from 0 to {most} was expected")
    return value


def require_manifest(directory: str | os.PathLike[str]) -> None:
    """Raises CheckpointError where there is nothing to verify against."""
    if not (Path(directory) / MANIFEST_NAME).exists():
        raise CheckpointError(
            f"There is no {MANIFEST_NAME} here, so nothing can be verified.",
            where=os.fspath(directory),
            expected="an iter_XXXXXXX directory that was saved with vime_optim",
            next_step="`vime-optim inspect` looks a checkpoint of any origin over.",
        )


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a checkpoint: the file, the keys concerned and the range in bytes."""

    file: str
    what: str
    start: int = 0
    end: int = 0
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.file} {self.place}".rstrip() + f": {self.what}"

    @property
    def place(self) -> str:
        """The range in bytes, and what it holds."""
        span = [f"bytes [{self.start}, {self.end})"] if self.end else []
        more = f" and {len(self.keys) - 3} more" if len(self.keys) > 3 else ""
        held = [f"holding {', '.join(self.keys[:3])}{more}"] if self.keys else []
        return " ".join([*span, *held])


@dataclass(frozen=True)
class Verification:
    """The outcome of `verify_directory`."""

    directory: str
    has_manifest: bool
    problems: tuple[Problem, ...]
    files: int
    bytes_read: int
    uncovered: tuple[str, ...] = ()
    """Files in the directory that the manifest says nothing about."""

    @property
    def ok(self) -> bool:
        return not self.problems


def check_file(directory: str | os.PathLike[str], record: FileRecord) -> list[Problem]:
    """Cheap check of one file: there, of its size, and the very file that was written."""
    path = Path(directory) / record.name

    def problem(what: str, start: int = 0, end: int = 0) -> list[Problem]:
        keys = keys_in(directory, record.name, start, end or record.size_bytes)
        return [Problem(record.name, what, start, end, keys)]

    try:
        status = path.stat()
    except FileNotFoundError:
        return problem(_MISSING)
    if not stat.S_ISREG(status.st_mode):
        return problem(_NOT_PLAIN)
    size = status.st_size
    if size != record.size_bytes:
        what = f"the file has {size} bytes, {record.size_bytes} were written"
        return problem(what, *sorted((size, record.size_bytes)))
    if record.stamp and (stamp := read_stamp(path)) != record.stamp:
        return problem(
            "another file under this name, or of another save:"
            f" its stamp is {stamp or 'missing'}, {record.stamp} was written"
        )
    return []


def verify_files(
    directory: str | os.PathLike[str],
    records: Sequence[FileRecord],
    chunk_bytes: int = CHUNK_BYTES,
    part: int = 0,
    parts: int = 1,
) -> list[Problem]:
    """Read files whole, and compare their digests.

    Args:
        part, parts: read every `parts`-th chunk of the files together, beginning with number
            `part`: the ranks of a job share the work evenly, whatever the files' sizes.
    """
    problems: list[Problem] = []
    wanted: list[tuple[FileRecord, int]] = []
    counted = 0
    for number, record in enumerate(records):
        found = check_file(directory, record)
        if number % parts == part:
            problems += found
        if not any(p.what in (_MISSING, _NOT_PLAIN) for p in found):
            wanted += [(record, n) for n in range(record.chunks) if (counted + n) % parts == part]
        counted += record.chunks
    return problems + verify_chunks(directory, wanted, chunk_bytes)


def verify_chunks(
    directory: str | os.PathLike[str],
    chunks: Iterable[tuple[FileRecord, int]],
    chunk_bytes: int = CHUNK_BYTES,
) -> list[Problem]:
    """Read chunks of files, each a record and the chunk's number in its file, by several threads
    and a megabyte at a time, and compare their digests."""

    def problem_of(chunk: tuple[FileRecord, int]) -> Problem | None:
        record, number = chunk
        start = number * chunk_bytes
        end = min(start + chunk_bytes, record.size_bytes)
        digest = digest_of(Path(directory) / record.name, start, end)
        if digest == record.chunk_digests[8 * number :][:8]:
            return None
        keys = keys_in(directory, record.name, start, end)
        return Problem(record.name, DIFFERS, start, end, keys)

    with ThreadPoolExecutor(default_threads(), thread_name_prefix="vime_optim verify") as pool:
        return [problem for problem in pool.map(problem_of, chunks) if problem is not None]


def verify_directory(
    directory: str | os.PathLike[str],
    *,
    deep: bool = True,
    progress: Callable[[int], None] | None = None,
) -> Verification:
    """Check a checkpoint directory against its manifest. Reads one chunk at a time.

    Args:
        directory: a checkpoint directory (`iter_0000100`).
        deep: compare digests of all bytes; False: sizes and stamps alone.
        progress: called with the number of bytes of each file that is done.

    Returns:
        Every problem found. Without a manifest: has_manifest False and no problems.

    Raises:
        CheckpointError: the manifest is damaged.
        OSError: a file cannot be read.
    """
    manifest = read_manifest(directory)
    names = {p.relative_to(directory).as_posix() for p in Path(directory).rglob("*") if p.is_file()}
    if manifest is None:
        return Verification(str(directory), False, (), 0, 0, tuple(sorted(names)))
    problems: list[Problem] = []
    bytes_read = 0
    for record in manifest.records.values():
        if deep:
            problems += verify_files(directory, [record], manifest.chunk_bytes)
            bytes_read += record.size_bytes
        else:
            problems += check_file(directory, record)
        if progress is not None:
            progress(record.size_bytes)
    uncovered = names - manifest.records.keys() - {MANIFEST_NAME}
    return Verification(
        str(directory),
        True,
        tuple(problems),
        len(manifest.records),
        bytes_read,
        tuple(sorted(uncovered)),
    )


def amend(directory: str | os.PathLike[str], *names: str) -> None:
    """Add files to an existing manifest (or renew them); nothing where there is no manifest."""
    manifest = read_manifest(directory)
    if manifest is not None:
        manifest.add_files(directory, *names)
        manifest.write(directory)

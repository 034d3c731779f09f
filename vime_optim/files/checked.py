"""What is read is compared with the digests that were made when it was written.

A digest covers a chunk of a file. Threads that read a chunk's elements digest them at once, while
they are in the cache, together with what lies between them (heads of archives, other elements),
which is read for it alone. So that this costs little, only so much is read for digests alone as
`extra_bytes` allows; the rest is counted.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

import xxhash

from vime_optim.errors import CheckpointError

FREE_BYTES = 64 << 20
"""What a rank may always read for digests alone."""

SHARE = 16
"""And this part of what it reads anyway."""

_READ_BYTES = 1 << 20
_thread = threading.local()


def extra_bytes(wanted_bytes: int) -> int:
    """How much may be read for digests alone beside `wanted_bytes`."""
    return FREE_BYTES + wanted_bytes // SHARE


class FileCheck:
    """One file of one load. Shared by threads.

    Args:
        path: the file.
        size_bytes: its size, which was looked at.
        chunk_bytes: what a digest covers (the last one of a file: less).
        digests: xxh3-64 of each chunk, 8 bytes each.
        name_keys: what lies in a range of the file, for errors.
    """

    def __init__(
        self,
        path: str,
        size_bytes: int,
        chunk_bytes: int,
        digests: bytes,
        name_keys: Callable[[int, int], str],
    ) -> None:
        self.path, self.size_bytes, self.chunk_bytes = path, size_bytes, chunk_bytes
        self.digests, self._name_keys = digests, name_keys
        self.used: set[int] = set()
        """Chunks that something was read from."""
        self.right: set[int] = set()
        """Chunks whose digest was compared."""

    def use(self, start: int, end: int) -> None:
        """Note that the bytes [start, end) count for what is loaded."""
        if end > start:
            self.used.update(range(start // self.chunk_bytes, -(-end // self.chunk_bytes)))

    @property
    def where(self) -> str:
        return self.path

    @property
    def chunks(self) -> int:
        return len(self.digests) // 8

    def end_of(self, number: int) -> int:
        return min((number + 1) * self.chunk_bytes, self.size_bytes)

    def compare(self, number: int, digest: bytes) -> None:
        """
        Raises:
            CheckpointError: the chunk is not what was written.
        """
        if digest != self.digests[8 * number :][:8]:
            start, end = number * self.chunk_bytes, self.end_of(number)
            raise CheckpointError(
                "the bytes of a checkpoint file are not those that were written (digest differs)",
                where=self.path,
                got=f"bytes [{start}, {end}){self._name_keys(start, end)}",
                next_step="copy this file again from its source, or load an older checkpoint",
            )
        self.right.add(number)

    def read_and_compare(self, number: int) -> None:
        start = number * self.chunk_bytes
        self.compare(number, digest_of(self.path, start, self.end_of(number)))


def digest_of(path: str | os.PathLike[str], start: int, end: int) -> bytes:
    """xxh3-64 of a range of a file, or of what there is of it."""
    state = xxhash.xxh3_64()
    buffer = memoryview(bytearray(min(_READ_BYTES, end - start)))
    with open(path, "rb", buffering=0) as file:
        while start < end:
            count = os.preadv(file.fileno(), [buffer[: end - start]], start)
            if count <= 0:
                break
            state.update(buffer[:count])
            start += count
    return state.digest()


@dataclass(slots=True)
class Link:
    """A part of a chunk that a thread reads and digests, after the parts before it."""

    chunk: OpenChunk
    start: int
    """Where the part begins: what lies before the wanted bytes is read for the digest alone."""
    gap_bytes: int
    is_last: bool
    previous: Future[None] | None

    def begin(self, gap: memoryview) -> None:
        if self.previous is not None:
            self.previous.exception()  # begun before this one: it never waits for a free thread
        self.digest(gap)

    def digest(self, part: memoryview) -> None:
        self.chunk.hash.update(part)

    def end(self) -> None:
        if self.is_last:
            self.chunk.check.compare(self.chunk.number, self.chunk.hash.digest())


@dataclass(slots=True)
class OpenChunk:
    """The chunk that a reader is in, as far as it was handed to threads."""

    check: FileCheck
    number: int
    descriptor: int
    position: int
    last: Future[None] | None = None
    hash: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)

    @property
    def is_given_up(self) -> bool:
        return self.position < 0


class ChunkLinks:
    """Cuts what one reader reads, file after file, into links. Used by one thread."""

    def __init__(self, wanted_bytes: int) -> None:
        self._extra = extra_bytes(wanted_bytes)
        self._open: OpenChunk | None = None

    def link(self, check: FileCheck, descriptor: int, start: int, end: int) -> Link | None:
        """For the wanted bytes [start, end) of one chunk; None where it is not digested.

        The caller must have taken `rest` of another chunk before.
        """
        number = start // check.chunk_bytes
        if number in check.right:
            return None
        chunk = self._open
        if chunk is None:
            chunk = OpenChunk(check, number, descriptor, number * check.chunk_bytes)
            self._open = chunk
        return self._link(chunk, start, end)

    def is_elsewhere(self, check: FileCheck, start: int) -> bool:
        chunk = self._open
        number = start // check.chunk_bytes
        return chunk is not None and (chunk.check, chunk.number) != (check, number)

    def rest(self) -> Link | None:
        """Leave the open chunk: what is still missing of it, unless that is too much."""
        chunk, self._open = self._open, None
        if chunk is None or chunk.is_given_up:
            return None
        end = chunk.check.end_of(chunk.number)
        return None if chunk.position == end else self._link(chunk, end, end)

    def _link(self, chunk: OpenChunk, start: int, end: int) -> Link | None:
        gap = start - chunk.position
        if chunk.is_given_up or gap < 0 or 2 * gap > chunk.check.chunk_bytes or gap > self._extra:
            chunk.position = -1
            return None
        self._extra -= gap
        is_last = end == chunk.check.end_of(chunk.number)
        link = Link(chunk, chunk.position, gap, is_last, chunk.last)
        chunk.position = end
        return link


# What a load that is under way compares.


@contextmanager
def comparing(checks: Mapping[str, FileCheck]) -> Iterator[None]:
    """Within it, what this thread reads for DCP is compared.

    Args:
        checks: by absolute path; none: nothing is.
    """
    outer = getattr(_thread, "checks", {})
    _thread.checks = checks
    try:
        yield
    finally:
        _thread.checks = outer


def check_of(path: str) -> FileCheck | None:
    checks: Mapping[str, FileCheck] = getattr(_thread, "checks", {})
    return checks.get(os.path.abspath(path)) if checks else None

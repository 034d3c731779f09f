"""Writes `.distcp` files that every stock torch reads, at the speed of plain writes.

What torch does for each item: pickle the tensor, open a zip archive on the stream, compute a CRC-32
over all of its bytes, hand them to Python as `bytes` objects and copy them once more into the
stream's buffer. Here the archive's few hundred bytes are made beforehand and the tensor's own
memory goes to the file as it is, while another thread digests it for the manifest.

The archive has the layout that `torch.load` expects (stored entries, data aligned to 64 bytes).
The CRC-32 of the data entry is left zero: torch's reader is built without CRC checks, and
`torch.serialization.set_crc32_options(False)` writes such files too. The digests of
`vime_optim_manifest.json` take its place, and cover the rest of the file as well.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from vime_optim.files.archive import ALIGNMENT_BYTES, archive_frame, is_plain
from vime_optim.files.lazy import LazyValue
from vime_optim.files.window import WINDOW_BYTES, HostWindow

CHUNK_BYTES = 64 << 20
"""A digest covers this many bytes of a file (the last one of a file: fewer). Large, because each
digest of an async save costs a turn of the interpreter's lock, as each write does."""

_PIECE_BYTES = 8 << 20  # written, and handed to the digester, at a time: what a cache holds
_READ_BYTES = 1 << 20
_MOST_VIEWS = 512  # in one call; the kernel takes 1024
_TRAILER_MAGIC = b"vime_optim file "
STAMP_BYTES = 16
TRAILER_BYTES = len(_TRAILER_MAGIC) + STAMP_BYTES


@dataclass(frozen=True)
class FileRecord:
    """What was written to one file; goes into the manifest."""

    name: str
    size_bytes: int
    stamp: str
    """Random name of this very file, hex; also the last bytes of the file."""
    chunk_digests: bytes
    """xxh3-64 of each chunk of CHUNK_BYTES, 8 bytes each, big-endian."""

    @property
    def chunks(self) -> int:
        return len(self.chunk_digests) // 8


@dataclass(frozen=True)
class Extent:
    """Where one item lies in its file, in bytes."""

    offset: int
    length: int


class DigestingFile:
    """A file that is written once, front to back, and digested on the way.

    A thread of the file's own makes the digests, so that where a processor is free the write does
    not wait for it (both calls let go of the interpreter's lock). What is handed to `write` must
    not change before `settle` or `finish` returns. With `beside=False` the writing thread makes
    them, and nothing is needed any more when a call returns.

    It is always a new file: one that has the name already is unlinked, never truncated, so that
    hard links to it, its readers and a writer that outlived its job keep what they had.

    Raises what the operating system raises: OSError with ENOSPC, EIO, EROFS and so on. Whether the
    file is still the one of its name is looked at when the save ends, by its stamp: inode numbers
    mean little on some network file systems.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        progress: Callable[[], None] | None = None,
        *,
        beside: bool = True,
    ) -> None:
        self._fd = create_new(path)
        self._parts: list[memoryview] = []  # written and not yet handed to the digester
        self._parts_bytes = 0
        self._jobs: list[Future[None]] = []
        self._hash = xxhash.xxh3_64()  # of the chunk that is not full yet
        self._hashed_bytes = 0
        self._digests = bytearray()
        self._digester = (
            ThreadPoolExecutor(1, thread_name_prefix="vime_optim digest") if beside else None
        )
        self._progress = progress
        self.position = 0

    def write(self, data: Any) -> int:
        """Write all of a bytes-like object. Returns its number of bytes."""
        view = memoryview(data).cast("B")
        for at in range(0, len(view), _PIECE_BYTES):
            piece = view[at : at + _PIECE_BYTES]
            self._parts.append(piece)
            self._parts_bytes += len(piece)
            if self._parts_bytes >= _PIECE_BYTES:
                self._digest()
            _write_views(self._fd, [piece])
            self.position += len(piece)
            if self._progress is not None:
                self._progress()
        return len(view)

    def write_vector(self, views: Sequence[memoryview]) -> None:
        """Write all of `views`, one after the other, by as few calls as the kernel allows, then
        digest them. For a file with `beside=False`: few turns of the interpreter's lock."""
        for at in range(0, len(views), _MOST_VIEWS):
            _write_views(self._fd, list(views[at : at + _MOST_VIEWS]))
        self._update(views)
        self.position += sum(map(len, views))

    def _digest(self) -> None:
        parts, self._parts, self._parts_bytes = self._parts, [], 0
        if self._digester is None:
            self._update(parts)
        elif parts:
            self._jobs.append(self._digester.submit(self._update, parts))

    def _update(self, parts: Sequence[memoryview]) -> None:
        for part in parts:
            while part:
                piece = part[: CHUNK_BYTES - self._hashed_bytes]
                self._hash.update(piece)
                self._hashed_bytes += len(piece)
                if self._hashed_bytes == CHUNK_BYTES:
                    self._end_chunk()
                part = part[len(piece) :]

    def _end_chunk(self) -> None:
        self._digests += self._hash.digest()  # 8 bytes, big-endian
        self._hash, self._hashed_bytes = xxhash.xxh3_64(), 0

    def settle(self) -> None:
        """Return when nothing that was handed to `write` is needed any more."""
        self._digest()
        for job in self._jobs:
            job.result()
        self._jobs.clear()

    def finish(self, name: str) -> FileRecord:
        """Write the trailer, bring everything to stable storage and close."""
        stamp = secrets.token_bytes(STAMP_BYTES)
        self.write(_TRAILER_MAGIC + stamp)
        self._digest()
        os.fsync(self._fd)
        self.settle()
        if self._hashed_bytes:
            self._end_chunk()
        self.close()
        return FileRecord(name, self.position, stamp.hex(), bytes(self._digests))

    def close(self) -> None:
        if self._digester is not None:
            self._digester.shutdown(cancel_futures=True)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> DigestingFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def create_new(path: str | os.PathLike[str]) -> int:
    """A descriptor of a file that did not exist before, open for writing.

    Raises:
        OSError: from the file system.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, flags, 0o666)


def _write_views(fd: int, views: list[memoryview]) -> None:
    while views:
        written = os.writev(fd, views)
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]


def read_stamp(path: str | os.PathLike[str]) -> str | None:
    """The stamp in a file's trailer, hex; None when the file has no trailer of ours."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size < TRAILER_BYTES:
            return None
        file.seek(size - TRAILER_BYTES)
        trailer = file.read(TRAILER_BYTES)
    if not trailer.startswith(_TRAILER_MAGIC):
        return None
    return trailer[len(_TRAILER_MAGIC) :].hex()


def digest_file(
    path: str | os.PathLike[str], name: str | None = None, chunk_bytes: int | None = None
) -> FileRecord:
    """Digest a file that something else wrote (common.pt, .metadata).

    Args:
        name: in the manifest; the path's last part when left out.
        chunk_bytes: of the manifest; CHUNK_BYTES when left out.
    """
    chunk_bytes = chunk_bytes or CHUNK_BYTES
    size = os.stat(path).st_size
    starts = range(0, size, chunk_bytes)
    digests = [digest_of(path, start, min(start + chunk_bytes, size)) for start in starts]
    return FileRecord(name or Path(path).name, size, "", b"".join(digests))


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


def write_file(
    path: str | os.PathLike[str],
    name: str,
    items: Sequence[io.BytesIO | torch.Tensor],
    progress: Callable[[], None] | None = None,
) -> tuple[list[Extent], FileRecord]:
    """Write one `.distcp` file: byte objects as they are, tensors as `torch.save` would.

    Args:
        path: where; an existing file of that name is unlinked first.
        name: the file's name in the checkpoint directory.
        items: in file order. Tensors: any shape, dtype and device; views are written as they are,
            without the storage behind them, and device tensors a piece at a time.
        progress: called after each call of the kernel; may raise to stop the write.

    Returns:
        The extent of each item, and the file's record.

    Raises:
        OSError: from the file system.
        ValueError: a tensor without memory (of the meta device).
    """
    extents = []
    window = HostWindow()
    with DigestingFile(path, progress) as file:
        for data in items:
            padding, *parts = parts_of(data, file.position)
            file.write(padding)
            offset = file.position
            for part in parts:
                if isinstance(part, torch.Tensor):
                    _write_elements(file, part, window)
                else:
                    file.write(part)
            extents.append(Extent(offset, file.position - offset))
        return extents, file.finish(name)


def parts_of(data: io.BytesIO | torch.Tensor, position: int) -> list[Any]:
    """What an item is in its file: padding to the next 64 bytes, and then its bytes, in order, with
    the tensor standing for its elements.

    Args:
        data: the item.
        position: where in the file it comes.

    Raises:
        ValueError: a tensor without memory (of the meta device).
    """
    padding = bytes(-position % ALIGNMENT_BYTES)
    if isinstance(data, io.BytesIO):
        return [padding, data.getbuffer()]
    if data.device.type == "meta":
        raise ValueError(f"a tensor of the meta device has nothing to write: {tuple(data.shape)}")
    if not is_plain(data):
        return [padding, _saved_by_torch(data)]
    head, tail = archive_frame(tuple(map(int, data.shape)), data.dtype)
    return [padding, head, data, tail]


def _write_elements(file: DigestingFile, tensor: torch.Tensor, window: HostWindow) -> None:
    if isinstance(tensor, LazyValue):
        for block in tensor.blocks(WINDOW_BYTES // tensor.element_size()):
            _write_bytes(file, block, window)
    else:
        _write_bytes(file, tensor, window)


def _write_bytes(file: DigestingFile, tensor: torch.Tensor, window: HostWindow) -> None:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.device.type == "cpu":
        file.write(memoryview(data.numpy()))  # type: ignore[arg-type]
        return
    for piece in window.pieces(data, file.settle):
        file.write(piece)


def _saved_by_torch(tensor: torch.Tensor) -> memoryview:
    """What `torch.save` makes of a tensor that is not plain."""
    buffer = io.BytesIO()
    torch.save(tensor.detach().to("cpu", copy=True), buffer)
    return buffer.getbuffer()

"""Which chunks of a checkpoint's files a load reads from: what it compares with their digests."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from vime_optim.files.manifest import Manifest

Flags = npt.NDArray[np.uint8]

_thread = threading.local()


class ChunksRead:
    """Of every file of a manifest, the chunks that a load has read something from."""

    def __init__(self, directory: str | os.PathLike[str], manifest: Manifest) -> None:
        self._chunk_bytes = manifest.chunk_bytes
        self._of_path = {
            os.path.abspath(os.path.join(directory, record.name)): np.zeros(record.chunks, np.uint8)
            for record in manifest.records.values()
        }

    def note(self, path: str, start: int, end: int) -> None:
        flags = self._of_path.get(os.path.abspath(path))
        if flags is not None and end > start:
            flags[start // self._chunk_bytes : -(-end // self._chunk_bytes)] = 1

    @property
    def flags(self) -> Flags:
        """Of each chunk, in the order of `Manifest.chunks`, 1 where something was read from it."""
        return np.concatenate([np.zeros(0, np.uint8), *self._of_path.values()])


@contextmanager
def noting(chunks: ChunksRead | None) -> Iterator[None]:
    """Within it, `note` notes in `chunks` what this thread reads for DCP."""
    outer = getattr(_thread, "chunks", None)
    _thread.chunks = chunks
    try:
        yield
    finally:
        _thread.chunks = outer


def note(path: str, start: int, end: int) -> None:
    """The bytes [start, end) of a file count for what is loaded."""
    chunks: ChunksRead | None = getattr(_thread, "chunks", None)
    if chunks is not None:
        chunks.note(path, start, end)

"""Writes a save while the training waits, and what every write reports.

Nothing here raises: an exception is a result like any other, which is raised by all ranks when the
save is finalized.
"""

from __future__ import annotations

import errno
import io
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult

from vime_optim.errors import WriterError
from vime_optim.files.fastfile import Extent, FileRecord, write_file

WriteBucket = tuple[str, str, tuple[list[Any], list[Any]]]
"""(path, file name, (byte items, tensor items)), as Megatron builds it."""


@dataclass(frozen=True)
class RecordedResult(WriteResult):
    """A WriteResult that also carries the record of its file (the last one of each file does).

    It travels to the coordinator with the results that are gathered anyway. `.metadata` takes
    only `storage_data` from it, so nothing of ours gets into that file.
    """

    record: FileRecord | None = None


class Stopped(Exception):
    """This write was given up because another one of the same save failed."""


def run(rank: int, write_buckets: Sequence[WriteBucket], results: Any) -> None:
    """Write all files, each by its own thread, and put {file number: results} or the error.

    Takes the arguments of Megatron's write function, whose place it takes. Async callers do not
    run it, they hand its arguments to `async_save`.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()  # the writers' threads copy on streams of their own
    try:
        outcome: Any = _write_all(write_buckets)
    except BaseException as error:  # a KeyboardInterrupt too: other ranks wait for this one
        outcome = as_error(rank, error)
    results.put(outcome)


def _write_all(write_buckets: Sequence[WriteBucket]) -> dict[int, Any]:
    failed = threading.Event()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def check() -> None:
        if failed.is_set():
            raise Stopped

    def write(bucket: WriteBucket) -> Any:
        try:
            if device is not None:
                # A new thread starts on device 0; work there would open a context on it.
                torch.cuda.set_device(device)
            return write_bucket(bucket, check)
        except BaseException as error:
            failed.set()
            return error

    with ThreadPoolExecutor(max(1, len(write_buckets)), "vime_optim writer") as pool:
        results = list(pool.map(write, write_buckets))
    errors = [r for r in results if isinstance(r, BaseException)]
    if errors:
        # A write that was stopped because of another's failure is not the cause.
        raise next((e for e in errors if not isinstance(e, Stopped)), errors[0])
    return dict(enumerate(results))


def write_bucket(bucket: WriteBucket, progress: Callable[[], None]) -> list[WriteResult]:
    """Write one file. Returns DCP's results, the last one with the file's record.

    Raises:
        OSError: with the path in it, from the file system.
    """
    path, name, (byte_items, tensor_items) = bucket
    pairs: Sequence[tuple[Any, Any]] = [*byte_items, *tensor_items]
    data: list[io.BytesIO | torch.Tensor] = [item_data for _, item_data in pairs]
    try:
        extents, record = write_file(path, name, data, progress)
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
    return results_of(pairs, extents, name, record)


def results_of(
    pairs: Sequence[tuple[Any, Any]], extents: Sequence[Extent], name: str, record: FileRecord
) -> list[WriteResult]:
    """DCP's results for the items of one file.

    Args:
        pairs: (item, data), in file order.
        extents: where each item lies.
        name: the file's.
        record: goes with the last item.
    """
    return [
        RecordedResult(
            index=item.index,
            size_in_bytes=extent.length,
            storage_data=_StorageInfo(name, extent.offset, extent.length),
            record=record if position == len(pairs) - 1 else None,
        )
        for position, ((item, _), extent) in enumerate(zip(pairs, extents, strict=True))
    ]


def as_error(rank: int, error: BaseException) -> Exception:
    """What a failed write reports."""
    return WriterError(
        f"writing the checkpoint failed: {type(error).__name__}: {error}",
        where=str(getattr(error, "filename", None) or "") or None,
        next_step=_hint(error),
        rank=rank,
    )


def _hint(error: BaseException) -> str | None:
    code = getattr(error, "errno", None)
    if code in (errno.ENOSPC, errno.EDQUOT):
        return "free space or raise the quota of the checkpoint file system, then save again"
    if code in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "make the checkpoint directory writable for this user on every node"
    if code == errno.EIO:
        return "the file system reports an I/O error: look at the kernel log of this node"
    return None

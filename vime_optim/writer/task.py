"""What runs in the writer process: stage device tensors, write the files, report.

Everything here is found by import in a spawned worker, so it needs no patch there. It never
raises: an exception is a result like any other, because a worker that dies of one leaves the
trainer waiting.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult

from vime_optim.writer.channel import ResultChannel
from vime_optim.writer.fastfile import FileRecord, write_file

WriteBucket = tuple[str, str, tuple[list[Any], list[Any]]]
"""(path, file name, (byte items, tensor items)), as Megatron builds it."""

_BEAT_S = 1.0
_ORPHAN_POLL_S = 0.25


@dataclass(frozen=True)
class RecordedResult(WriteResult):
    """A WriteResult that also carries the record of its file (the last one of each file does).

    It travels to the coordinator with the results that are gathered anyway. `.metadata` takes
    only `storage_data` from it, so nothing of ours gets into that file.
    """

    record: FileRecord | None = None


class PreloadFailed:
    """Stands for the buckets when staging them failed; carries the reason to `run`."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


class _Thread(threading.local):
    writes_itself = False


_thread = _Thread()


@contextlib.contextmanager
def written_here() -> Iterator[None]:
    """Within it, this thread of the training process writes a save itself, and waits for it."""
    before, _thread.writes_itself = _thread.writes_itself, True
    try:
        yield
    finally:
        _thread.writes_itself = before


def preload(trainer_pid: int, stage: Callable[[], list[WriteBucket]]) -> Any:
    """Stage the tensors on the host by Megatron's own function, and let go of the originals.

    A save that is written here and now is not staged: the file writer takes device tensors.

    Returns:
        The buckets, or PreloadFailed.
    """
    if os.getpid() != trainer_pid:
        _exit_with_trainer(trainer_pid)
    elif _thread.writes_itself and (buckets := _buckets_of(stage)) is not None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # the writers' threads copy on streams of their own
        return buckets
    try:
        buckets = stage()
    except BaseException as error:  # a KeyboardInterrupt too: other ranks wait for this one
        return PreloadFailed(f"staging the tensors failed: {type(error).__name__}: {error}")
    if os.getpid() != trainer_pid:
        _release_sources(stage, buckets)
    return buckets


def _release_sources(stage: Any, staged: list[WriteBucket]) -> None:
    """Empty the lists that the request still holds, so that a worker which keeps its last
    request (0.15) holds no device or shared memory until the next one."""
    buckets = _buckets_of(stage)
    if buckets is None or buckets is staged:
        return
    for bucket in buckets:
        bucket[2][1].clear()


def _buckets_of(stage: Any) -> list[WriteBucket] | None:
    """What Megatron's staging function would stage: the first argument of a partial."""
    arguments = getattr(stage, "args", ())
    return arguments[0] if arguments and isinstance(arguments[0], list) else None


def run(trainer_pid: int, rank: int, write_buckets: Any, channel: ResultChannel) -> None:
    """Write all files, each by its own thread, and publish {file number: results} or the error.

    Past `trainer_pid` it takes the arguments of Megatron's write function, whose place it takes.
    """
    if os.getpid() != trainer_pid:
        _exit_with_trainer(trainer_pid)
        # A forked child must not touch the parent's OpenMP threads, which do not exist in it.
        torch.set_num_threads(1)
    collecting = gc.isenabled()
    gc.disable()  # collecting the parent's device tensors in a child is a CUDA error
    try:
        _run(rank, write_buckets, channel)
    finally:
        if collecting:
            gc.enable()


def _run(rank: int, write_buckets: Any, channel: ResultChannel) -> None:
    try:
        result: Any = _write_all(write_buckets, channel)
    except BaseException as error:
        result = _as_error(rank, error)
    # Staged copies are let go of. What was not staged is the request's own, which may be executed
    # again after a failure. In a child forked after CUDA started, freeing pinned copies is a CUDA
    # call, which aborts it.
    staged = isinstance(write_buckets, list) and not _thread.writes_itself
    if staged and not torch.cuda._is_in_bad_fork():
        for bucket in write_buckets:
            bucket[2][1].clear()
    try:
        channel.put(result)
    except OSError:
        # Nothing can be said any more; the trainer reports a writer that ended without result.
        return


def _write_all(write_buckets: Any, channel: ResultChannel) -> dict[int, Any]:
    if isinstance(write_buckets, PreloadFailed):
        raise RuntimeError(write_buckets.reason)
    progress = _Progress(channel)
    results: dict[int, Any] = {}
    device = _device_of_process()

    def work(number: int) -> None:
        try:
            if device is not None:
                # A new thread starts on device 0; work there would open a context on it.
                torch.cuda.set_device(device)
            results[number] = write_bucket(write_buckets[number], progress)
        except BaseException as error:
            progress.stop = True
            results[number] = error

    threads = [
        threading.Thread(target=work, args=(number,), name=f"vime_optim writer {number}")
        for number in range(1, len(write_buckets))
    ]
    for thread in threads:
        thread.start()
    if write_buckets:
        work(0)
    for thread in threads:
        thread.join()
    errors = [r for r in results.values() if isinstance(r, BaseException)]
    if errors:
        # A write that was stopped because of another's failure is not the cause.
        raise next((e for e in errors if not isinstance(e, _Stopped)), errors[0])
    return dict(sorted(results.items()))


def _device_of_process() -> int | None:
    """The current device, None where there is none or this process may not use it."""
    if not torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork():  # type: ignore[no-untyped-call]
        return None
    return torch.cuda.current_device()


class _Stopped(Exception):
    """This write was given up because another one of the same save failed."""


class _Progress:
    """Called by the file writers after every chunk: signs of life, and the stop flag."""

    def __init__(self, channel: ResultChannel) -> None:
        self._channel = channel
        self._last = 0.0
        self.stop = False
        self()

    def __call__(self) -> None:
        if self.stop:
            raise _Stopped
        now = time.monotonic()
        if now - self._last > _BEAT_S:
            self._last = now
            if isinstance(self._channel, ResultChannel):
                self._channel.beat()


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
    results: list[WriteResult] = []
    for position, ((item, _), extent) in enumerate(zip(pairs, extents, strict=True)):
        results.append(
            RecordedResult(
                index=item.index,
                size_in_bytes=extent.length,
                storage_data=_StorageInfo(name, extent.offset, extent.length),
                record=record if position == len(pairs) - 1 else None,
            )
        )
    return results


def _as_error(rank: int, error: BaseException) -> Exception:
    """An exception that any process can unpickle."""
    from vime_optim.errors import WriterError

    return WriterError(
        f"writing the checkpoint failed: {type(error).__name__}: {error}",
        where=str(getattr(error, "filename", None) or "") or None,
        next_step=_hint(error),
        rank=rank,
    )


def _hint(error: BaseException) -> str | None:
    import errno

    code = getattr(error, "errno", None)
    if code in (errno.ENOSPC, errno.EDQUOT):
        return "free space or raise the quota of the checkpoint file system, then save again"
    if code in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "make the checkpoint directory writable for this user on every node"
    if code == errno.EIO:
        return "the file system reports an I/O error: look at the kernel log of this node"
    return None


_watching_trainer = False


def _exit_with_trainer(trainer_pid: int) -> None:
    """End this worker when its trainer is gone.

    An orphan would go on writing into a directory that the restarted job may be saving to, and a
    persistent one would wait for the next request, with its memory, for ever. The trainer itself
    is watched: the parent of a worker may be a fork server, which is another process.
    """
    global _watching_trainer
    if _watching_trainer:
        return
    _watching_trainer = True

    def watch() -> None:
        _wait_for_end_of(trainer_pid)
        message = f"vime_optim: trainer {trainer_pid} is gone, so its checkpoint writer ends\n"
        with contextlib.suppress(OSError):
            os.write(2, message.encode())
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="vime_optim trainer watch").start()


def _wait_for_end_of(pid: int) -> None:
    """Return when a process, which need not be a parent or a child, has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except OSError:  # an old kernel, or a sandbox without this call
        while _is_running(pid):
            time.sleep(_ORPHAN_POLL_S)
        return
    poll = select.poll()
    poll.register(handle, select.POLLIN)  # readable when the process has ended
    while not poll.poll():
        pass


def _is_running(pid: int) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in ("Z", "X")  # a zombie has ended

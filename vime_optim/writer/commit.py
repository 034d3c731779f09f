"""From 'the results are there' to 'the checkpoint is complete', the same on every rank.

A failure on one rank (or of one rank's writer) must be raised by all, and nothing may then point to
the directory. Megatron writes `metadata.json` last, so a directory without it is unfinished; here
an old one is taken away before the first byte of a new save is written.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vime_optim.errors import WriterError
from vime_optim.writer.agreement import agree, describe
from vime_optim.writer.fastfile import FileRecord, digest_file
from vime_optim.writer.manifest import MANIFEST_NAME, Item, Manifest, amend, sync_directory
from vime_optim.writer.task import RecordedResult

_PROBE_NAME = ".vime_optim_probe"
_COMMIT_FILES = ("metadata.json", MANIFEST_NAME, ".metadata")  # in the order of removal
_PROBE_BYTES = 4096


class SaveSession:
    """One call of `dist_checkpointing.save`, from before its first write to its commit.

    Attributes:
        error: what went wrong on this rank alone, where the others could not see it.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.error: str | None = None
        self._lock_fd = -1

    def begin(self) -> None:
        """Collective. Rank 0 locks the directory, proves it writable and takes away the marks of
        an older checkpoint in it.

        Raises:
            WriterError: on every rank, when rank 0 could not.
        """
        if torch.distributed.get_rank() == 0:
            self.guarded(self._prepare)
        try:
            agree(self.error, "the checkpoint directory cannot be saved to", self.directory)
        except BaseException:
            self.release()
            raise

    def _prepare(self) -> None:
        directory = Path(self.directory)
        self._lock()
        for name in _COMMIT_FILES:
            (directory / name).unlink(missing_ok=True)
        probe = directory / _PROBE_NAME
        try:
            with open(probe, "wb") as file:
                file.write(bytes(_PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)

    def _lock(self) -> None:
        """Lock the directory itself: a lock file would be taken for an old checkpoint's rest."""
        try:
            fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return  # the probe, or the save itself, says what is wrong with it
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise RuntimeError(
                "another save is writing to it: a second job, or a writer of an earlier save"
            ) from None
        except OSError:
            os.close(fd)  # this file system has no locks
            return
        # Forked writers inherit the lock: it holds until the last of them is gone.
        self._lock_fd = fd

    def guarded(self, step: Callable[[], Any]) -> Any:
        """Run a step that only this rank takes; its exception waits for the next `agree`."""
        try:
            return step()
        except BaseException as error:  # a KeyboardInterrupt too: the others wait in `agree`
            self.error = self.error or describe(error)
            return None

    def finish(self) -> None:
        """Collective, the last finalization step: all ranks commit or all raise."""
        try:
            agree(self.error, "the checkpoint was not completed", self.directory)
        finally:
            self.release()

    def release(self) -> None:
        """Give up the directory."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


_sessions: dict[str, SaveSession] = {}


def open_session(directory: str) -> SaveSession:
    """Begin a session; one that this process left open for the same directory is given up."""
    key = os.path.abspath(directory)
    left = _sessions.pop(key, None)
    if left is not None:
        left.release()
    session = SaveSession(directory)
    _sessions[key] = session
    session.begin()
    return session


def session_of(directory: str | os.PathLike[str]) -> SaveSession | None:
    return _sessions.get(os.path.abspath(directory))


def close_session(session: SaveSession) -> None:
    """Collective: `SaveSession.finish`, and forget it."""
    _sessions.pop(os.path.abspath(session.directory), None)
    session.finish()


def abandon_session(session: SaveSession) -> None:
    """Not collective: this rank is raising already."""
    _sessions.pop(os.path.abspath(session.directory), None)
    session.release()


def rank0_step(session: SaveSession, name: str, step: Callable[[], Any]) -> Any:
    """Run a step that writes `name` on rank 0 alone; the other ranks learn of a failure later.

    After a failure nothing more is written: `metadata.json` would declare the directory complete.
    """
    if session.error is not None:
        return None
    result = session.guarded(step)
    if name == "metadata.json":
        if session.error is None:
            session.guarded(lambda: _after_commit(session))
        if session.error is not None:
            (Path(session.directory) / name).unlink(missing_ok=True)
    return result


def _after_commit(session: SaveSession) -> None:
    amend(session.directory, "metadata.json")
    sync_directory(session.directory)


def finalize(
    original: Callable[..., None], writer: Any, global_metadata: Any, dist_wrapper: Any
) -> None:
    """Megatron's finalization of one save, with every failure raised on all ranks.

    Raises:
        WriterError: on every rank, naming each rank that failed and why.
    """
    results = writer.retrieve_write_results()
    # Not always a queue that can be asked twice: the answer is kept for Megatron's own call.
    writer.retrieve_write_results = lambda: results
    errors = [_failure_in(results, writer)]
    commit = writer.finish

    def finish(*args: Any, **kwargs: Any) -> None:
        # An exception here would be the coordinator's alone and leave the others in a broadcast.
        try:
            commit(*args, **kwargs)
        except BaseException as error:
            errors.append(describe(error))

    writer.finish = finish
    where = str(writer.checkpoint_dir)
    try:
        agree(next(filter(None, errors), None), "writing the checkpoint failed", where)
        original(writer, global_metadata, dist_wrapper)
        agree(next(filter(None, errors), None), "completing the checkpoint failed", where)
    except WriterError:
        session = session_of(where)
        if session is not None:
            abandon_session(session)
        raise
    finally:
        del writer.finish, writer.retrieve_write_results


def _failure_in(results: Any, writer: Any) -> str | None:
    """This rank's failure, None when its results are sound."""
    channel = getattr(writer, "results_queue", None)
    known = getattr(channel, "failure", None)
    if known is not None:
        return str(known)
    if isinstance(results, list):
        return None
    error = results[0] if isinstance(results, tuple) else results
    cause = getattr(error, "__cause__", None)
    return describe(cause if cause is not None else error)


def write_manifest(directory: str, results: list[list[Any]]) -> None:
    """On the coordinator, after `.metadata`: the manifest of everything that is there by now.

    Does nothing when some file was not written by our writer (the manifest would have holes).
    """
    manifest = Manifest()
    for rank_results in results:
        items: list[Item] = []
        for result in rank_results:
            record = getattr(result, "record", None)
            if not isinstance(result, RecordedResult):
                return
            items.append(_item(result))
            if isinstance(record, FileRecord):
                manifest.add(record, items)
                items = []
    for name in (".metadata", "common.pt"):
        path = Path(directory) / name
        if path.is_file():
            manifest.add(digest_file(path, name))
    manifest.write(directory)


def _item(result: RecordedResult) -> Item:
    index = result.index
    info = result.storage_data
    offsets = None if index.offset is None else tuple(int(size) for size in index.offset)
    return Item(index.fqn, info.offset, info.length, offsets)

"""From 'the results are there' to 'the checkpoint is complete', the same on every rank.

A failure on one rank (or of one rank's writer) must be raised by all, and nothing may then point to
the directory. Megatron writes `metadata.json` last, so a directory without it is unfinished; here
an old one is taken away before the first byte of a new save is written.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from vime_optim.commit.agreement import agree, describe
from vime_optim.commit.lock import DirectoryLock
from vime_optim.commit.task import RecordedResult
from vime_optim.errors import WriterError
from vime_optim.files.fastfile import FileRecord
from vime_optim.files.manifest import MANIFEST_NAME, Manifest, amend, check_file
from vime_optim.files.plain import sync_directory, write_new

_PROBE_NAME = ".vime_optim_probe"
_COMMIT_FILES = ("metadata.json", MANIFEST_NAME, ".metadata")  # in the order of removal
_PROBE_BYTES = 4096
_DATA_FILE = re.compile(r"(?!\.).*__\d+_\w+\.distcp")


class SaveSession:
    """One call of `dist_checkpointing.save`, from before its first write to its commit.

    Attributes:
        error: what went wrong on this rank alone, where the others could not see it.
        written: small files that this rank alone has written.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.error: str | None = None
        self.written: set[str] = set()
        self._lock: DirectoryLock | None = None

    def begin(self) -> None:
        """Collective. Rank 0 locks the directory, removes an older checkpoint in it (the files that
        make it count as complete first), and tries to write.

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
        self._lock = DirectoryLock.of(self.directory)
        self.take_away_marks()
        if self._lock.sessions == 1:  # else another save of this process is writing here
            _take_away_data(directory)
        probe = directory / _PROBE_NAME
        probe.unlink(missing_ok=True)
        try:
            write_new(probe, bytes(_PROBE_BYTES))
        finally:
            probe.unlink(missing_ok=True)

    def take_away_marks(self) -> None:
        """Remove the files by which a reader takes the directory for complete."""
        for name in _COMMIT_FILES:
            (Path(self.directory) / name).unlink(missing_ok=True)

    def guarded(self, step: Callable[[], Any]) -> Any:
        """Run a step that only this rank takes; its exception waits for the next `agree`."""
        try:
            return step()
        except BaseException as error:  # a KeyboardInterrupt too: the others wait in `agree`
            self.error = self.error or describe(error)
            return None

    def require_written(self) -> None:
        """Raises FileNotFoundError where a small file is gone since it was written."""
        for name in sorted(self.written):
            path = Path(self.directory) / name
            if not path.is_file():
                raise FileNotFoundError(errno.ENOENT, "gone since it was written", str(path))

    def finish(self) -> None:
        """Collective, the last finalization step: all ranks commit or all raise."""
        try:
            agree(self.error, "the checkpoint was not completed", self.directory)
        finally:
            self.release()

    def release(self) -> None:
        """Give up the lock of the directory. Called again, it does nothing."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _take_away_data(directory: Path) -> None:
    """Unlink the data files of an older save; nothing of the new one has their names."""
    for entry in list(os.scandir(directory)):
        if _DATA_FILE.fullmatch(entry.name) and not entry.is_dir(follow_symlinks=False):
            Path(entry.path).unlink(missing_ok=True)


_current: ContextVar[SaveSession | None] = ContextVar("vime_optim save", default=None)


@contextlib.contextmanager
def belonging_to(session: SaveSession) -> Iterator[None]:
    """Within it `session_of` answers with this save: several to one directory may be under way."""
    before = _current.set(session)
    try:
        yield
    finally:
        _current.reset(before)


def session_of(directory: str | os.PathLike[str]) -> SaveSession | None:
    """The save that the running code belongs to, None where it is not one to `directory`."""
    session = _current.get()
    if session is None or os.path.abspath(directory) != os.path.abspath(session.directory):
        return None
    return session


def open_session(directory: str) -> SaveSession:
    session = SaveSession(directory)
    session.begin()
    return session


def finalized_by(session: SaveSession, request: Any) -> None:
    """Run an async request's finalize functions as part of this save, and commit after them."""
    request.finalize_fns[:] = [
        functools.partial(_run_for, session, step) for step in request.finalize_fns
    ]
    request.add_finalize_fn(session.finish)


def _run_for(session: SaveSession, step: Callable[[], Any]) -> Any:
    with belonging_to(session):
        return step()


def rank0_step(session: SaveSession, name: str, step: Callable[[], Any]) -> Any:
    """Run a step that writes `name` on rank 0 alone; the other ranks learn of a failure later.

    After a failure nothing more is written: `metadata.json` would declare the directory complete.
    """
    if name == "metadata.json":
        session.guarded(session.require_written)
    if session.error is not None:
        return None
    result = session.guarded(step)
    session.written.add(name)
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
    original: Callable[..., None],
    writer: Any,
    global_metadata: Any,
    dist_wrapper: Any,
    pack: Callable[[Any], Any] = lambda results: results,
) -> None:
    """Megatron's finalization of one save, with every failure raised on all ranks.

    Args:
        pack: what a rank's results are sent as.

    Raises:
        WriterError: on every rank, naming each rank that failed and why.
    """
    try:
        results = writer.retrieve_write_results()
    except Exception as error:  # nvidia-resiliency-ext up to 0.4: on this rank alone
        results = error
    # Some queues answer only once, so Megatron's own call gets the answer that we have.
    writer.retrieve_write_results = lambda: pack(results)
    where = str(writer.checkpoint_dir)
    errors = [_failure_in(results, writer) or _lost_file(where, results)]
    commit = writer.finish

    def finish(*args: Any, **kwargs: Any) -> None:
        # An exception here would be the coordinator's alone and leave the others in a broadcast.
        try:
            commit(*args, **kwargs)
        except BaseException as error:
            errors.append(describe(error))

    writer.finish = finish
    try:
        agree(next(filter(None, errors), None), "writing the checkpoint failed", where)
        original(writer, global_metadata, dist_wrapper)
        agree(next(filter(None, errors), None), "completing the checkpoint failed", where)
    except WriterError:
        session = session_of(where)
        if session is not None:
            session.release()
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


def _lost_file(directory: str, results: Any) -> str | None:
    """A file of this rank's that is no longer what was written; None when all of them are.

    A directory may be removed or replaced while it is written, and the writer's descriptors do not
    notice.
    """
    if not isinstance(results, list):
        return None
    ends: dict[str, int] = {}
    records: dict[str, FileRecord] = {}
    for result in results:
        info = result.storage_data
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        record = getattr(result, "record", None)
        if isinstance(record, FileRecord):
            records[record.name] = record
    for name, end in ends.items():
        record = records.get(name)
        try:
            if record is not None:
                if problems := check_file(directory, record):
                    return str(problems[0])
            elif (Path(directory) / name).stat().st_size < end:
                return f"{name}: the file is shorter than what was written"
        except OSError as error:
            return describe(error)
    return None


def records_of(results: Sequence[Sequence[Any]]) -> list[FileRecord] | None:
    """The records of all files; None where another writer wrote some and left no records."""
    records: list[FileRecord] = []
    for part in results:
        if hasattr(part, "records"):  # columns
            records += part.records
        elif all(isinstance(result, RecordedResult) for result in part):
            records += [result.record for result in part if result.record is not None]
        else:
            return None
    return records


def write_manifest(directory: str, records: Sequence[FileRecord]) -> None:
    """On the coordinator, after `.metadata`: the manifest of everything that is there by now."""
    manifest = Manifest({record.name: record for record in records})
    manifest.add_files(directory, ".metadata", "common.pt")
    manifest.write(directory)

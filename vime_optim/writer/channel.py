"""How a writer process hands its results back: one small file per save.

Megatron keeps one queue for all saves, served by a manager process that is spawned at the first
save (it imports the training script again: seconds in a real job). Results of a save that was
given up stay in that queue and are taken for those of the next one. Here every save has its own
channel, which needs no process and outlives the death of any.
"""

from __future__ import annotations

import atexit
import itertools
import os
import pickle
import queue
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

_folder: tuple[int, Path] | None = None
_counter = itertools.count()


def _own_folder() -> Path:
    """A private folder of this process (mode 0700), removed when the process ends."""
    global _folder
    if _folder is None or _folder[0] != os.getpid():
        path = Path(tempfile.mkdtemp(prefix="vime_optim_results_"))
        _folder = (os.getpid(), path)
        atexit.register(_remove_folder, os.getpid(), path)
    return _folder[1]


def _remove_folder(owner_pid: int, path: Path) -> None:
    if os.getpid() == owner_pid:  # a forked writer inherits the exit handler, not the folder
        shutil.rmtree(path, ignore_errors=True)


class ResultChannel:
    """Carries one object from the writer to the trainer. Has the methods of a queue that
    Megatron and nvidia-resiliency-ext use.

    Attributes:
        failure: set in the trainer when the writer is known to be dead or the save to be unsound;
            taken instead of any result.
    """

    def __init__(self) -> None:
        self._path = _own_folder() / f"save-{next(_counter)}"
        self.failure: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_path": self._path, "failure": None}

    def put(self, obj: Any) -> None:
        """Publish the result, whole or not at all."""
        temporary = self._path.with_suffix(".part")
        temporary.write_bytes(pickle.dumps(obj))
        os.replace(temporary, self._path)

    def get_nowait(self) -> Any:
        """The result, which is then gone; the failure as a WriterError.

        Raises:
            queue.Empty: nothing was published.
        """
        if self.failure is not None:
            from vime_optim.errors import WriterError

            return WriterError(self.failure)
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            raise queue.Empty from None
        self.discard()
        # Written by our own writer into a folder that only this user can enter.
        return pickle.loads(data)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                return self.get_nowait()
            except queue.Empty:
                if not block or (deadline is not None and time.monotonic() > deadline):
                    raise
            time.sleep(0.01)

    def empty(self) -> bool:
        return self.failure is None and not self._path.exists()

    def qsize(self) -> int:
        return int(not self.empty())

    def discard(self) -> None:
        for path in (self._path, self._beat_path):
            path.unlink(missing_ok=True)

    # A sign of life: the writer touches a file, the trainer looks at its age.

    @property
    def _beat_path(self) -> Path:
        return self._path.with_suffix(".beat")

    def beat(self) -> None:
        """Called by the writer whenever it got further."""
        try:
            self._beat_path.touch()
        except OSError:
            pass  # a full /tmp must not fail a save that itself goes elsewhere

    def last_beat_s(self) -> float | None:
        """Seconds since the last sign of life; None before the first."""
        try:
            return max(0.0, time.time() - self._beat_path.stat().st_mtime)
        except OSError:
            return None

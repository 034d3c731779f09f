"""Saves where somebody put a method of his own in the place of the one that writes a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.planning import plan_job


def saves(payload: dict[str, Any]) -> dict[str, Any]:
    """Errors of a save whose method fails, of one that notes and writes, and of one as usual."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    import vime_optim

    vime_optim.install()
    writes = FileSystemWriterAsync.write_preloaded_data
    root = Path(payload["directory"])

    def fails(
        *_: Any, local_proc_idx: int, results_queue: Any, count_queue: Any, **__: Any
    ) -> None:
        error = OSError("this store is full")
        if results_queue is None:
            raise error  # the last worker is the caller itself, from 0.17 on
        results_queue.put((local_proc_idx, error))
        count_queue.get()
        count_queue.task_done()

    def notes(*given: Any, write_bucket: Any, **named: Any) -> Any:
        Path(write_bucket[0]).with_suffix(".noted").touch()
        return writes(*given, write_bucket=write_bucket, **named)

    errors = []
    for number, method in enumerate((fails, notes, writes)):
        FileSystemWriterAsync.write_preloaded_data = staticmethod(method)
        errors.append(plan_job._save(root / str(number), number, 0))
    noted = [len([*(root / str(number)).glob("*.noted")]) for number in range(3)]
    return {"errors": errors, "noted": noted}

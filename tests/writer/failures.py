"""Scenarios in which something breaks. Each returns what every rank saw; none may hang."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import gc
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.writer import faults
from tests.writer.readback import snapshot
from tests.writer.scenarios import TRACKER, Trainer, check, held, rank, torch_optimizers
from vime_optim.tools.bits import same_bits


def caught(action: Callable[[], Any]) -> dict[str, Any]:
    """The exception that an action raises on this rank, and how long it took."""
    began = time.monotonic()
    try:
        action()
    except Exception as error:
        return {
            "type": type(error).__name__,
            "text": str(error),
            "seconds": time.monotonic() - began,
        }
    return {"type": None, "text": "", "seconds": time.monotonic() - began}


def load_outcome(trainer: Trainer, directory: Path) -> dict[str, Any]:
    """What a load raises, and whether any tensor changed."""
    # Stock's template for a load takes a step with random gradients: made before the snapshot.
    template = trainer.state(is_loading=True)
    before = snapshot(template)
    outcome = caught(lambda: trainer.load(directory, template))
    after = snapshot(template)
    outcome["unchanged"] = all(same_bits(before[key], after[key]) for key in before)
    return outcome


def failures(root: str, names: list[str]) -> dict[str, Any]:
    """Run some of the functions below, one after the other, in one launch."""
    outcomes = {}
    for name in names:
        function, _, kind = name.partition(":")
        folder = Path(root) / name.replace(":", "_")
        outcomes[name] = globals()[function](folder, persistent=kind == "persistent")
        torch.distributed.barrier()
    # Workers are left to the end of the launch: starting one takes longer than the scenarios.
    return outcomes


def _finished(root: Path) -> list[str]:
    """The tracker and the marks of a complete checkpoint, where there are any."""
    torch.distributed.barrier()
    return sorted(
        path.relative_to(root).as_posix()
        for name in (TRACKER, "*/metadata.json", "*/vime_optim_manifest.json")
        for path in root.glob(name)
    )


def block_writer_of_rank_1(root: Path, trainer: Trainer) -> Path:
    """The writer of rank 1's next save stays in open() until the file that is returned is gone."""
    directory = root / f"iter_{trainer.iteration:07d}"
    if rank() == 0:
        faults.block(directory, "__1_0.distcp")
    torch.distributed.barrier()
    return directory / ".fault___1_0.distcp"


@contextmanager
def writers(on_rank_1: Callable[[], object]) -> Iterator[None]:
    """Within it, the writers of rank 1 call a function before they write anything."""
    from vime_optim.files.fastfile import DigestingFile

    real = DigestingFile.write_vector

    def write_vector(self: Any, views: Any) -> None:
        on_rank_1()
        real(self, views)

    if rank() == 1:
        DigestingFile.write_vector = write_vector  # type: ignore[method-assign]
    try:
        yield
    finally:
        DigestingFile.write_vector = real  # type: ignore[method-assign]


def _no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _then_a_good_save(trainer: Trainer, root: Path) -> list[str]:
    trainer.step()
    directory, expected = trainer.save(root)
    trainer.finalize()
    return check(directory, expected)


def _after_failure(trainer: Trainer, root: Path, directory: Path, raised: Any) -> dict[str, Any]:
    """What a save that raised leaves, whether it loads, and a good save after it."""
    finished = _finished(root)
    refused = load_outcome(trainer, directory)
    good = _then_a_good_save(trainer, root / "next")
    return {"raised": raised, "finished": finished, "load": refused, "good": good}


def failed_writer(root: Path, persistent: bool) -> dict[str, Any]:
    """A writer of rank 1 fails in the middle of an async save."""
    trainer = Trainer(persistent=persistent)
    trainer.step()
    with writers(_no_space):
        directory, _ = trainer.save(root)
        raised = caught(trainer.finalize)
    return _after_failure(trainer, root, directory, raised)


def killed_process(root: Path, persistent: bool) -> dict[str, Any]:
    """kill -9 of Megatron's process of rank 1, with a writer that is not ours."""
    from vime_optim import settings

    trainer = Trainer(persistent=persistent)
    trainer.step()
    usual = settings.current()
    settings.activate(dataclasses.replace(usual, async_mode="off"))
    _then_a_good_save(trainer, root / "before")  # a worker that is started already
    pipe = root / f"iter_{trainer.iteration:07d}" / "__1_0.distcp"
    if rank() == 0:  # its writer stays in open()
        pipe.parent.mkdir(parents=True)
        os.mkfifo(pipe)
    torch.distributed.barrier()
    trainer.save(root)
    if rank() == 1:
        os.kill(trainer.worker().pid, signal.SIGKILL)
    raised = caught(trainer.finalize)
    finished = _finished(root)
    trainer.step()
    good = _then_a_good_save(trainer, root / "next")
    settings.activate(usual)
    return {"raised": raised, "finished": finished, "good": good}


def exit_in_flight(root: Path, persistent: bool) -> dict[str, Any]:
    """close(abort=True) with saves in flight: nothing looks complete, nothing is written later."""
    from vime_optim.async_save import guard

    gate = threading.Event()
    trainer = Trainer(persistent=persistent)
    trainer.step()
    with writers(lambda: gate.wait(0.5)):
        trainer.save(root)
        trainer.step()
        trainer.save(root)
        unfinished = trainer.queue.get_num_unfinalized_calls()
        trainer.queue.close(abort=True)
    left = len(guard.in_flight())
    trainer.queue.async_calls.clear()
    good = _then_a_good_save(trainer, root / "next")
    return {"unfinished": unfinished, "left": left, "finished": _finished(root), "good": good}


def several_in_flight(root: Path, persistent: bool) -> dict[str, Any]:
    """Three saves, one after each step, while nothing is written; finalized in order."""
    from vime_optim.async_save import units

    usual, units.UNIT_BYTES = units.UNIT_BYTES, 1 << 16
    trainer = Trainer(1 << 16, persistent=persistent)
    trainer.step()
    saves = []
    try:
        with held():
            for _ in range(3):
                saves.append(trainer.save(root))
                trainer.step()
            early = trainer.finalize(blocking=False)
        order = trainer.finalize()
    finally:
        units.UNIT_BYTES = usual
    return {"torn": [check(*save) for save in saves], "order": [*early, *order]}


def uninstalled(root: Path, persistent: bool) -> dict[str, Any]:
    """What uninstall() does first with a save in flight, then Megatron's own code finalizes it."""
    from tests.writer import scenarios
    from vime_optim.async_save import callers

    trainer = Trainer(persistent=persistent)
    trainer.step()
    with held():
        directory, expected = trainer.save(root)
        callers.finish_all()
        scenarios.uninstall_writer_fixes()
        raised = caught(trainer.finalize)
    torn = check(directory, expected)
    scenarios.install_writer_fixes()
    return {"raised": raised, "torn": torn}


def full_disk(root: Path, persistent: bool) -> dict[str, Any]:
    """ENOSPC for one file of rank 1."""
    return _with_device_full(root, persistent, "__1_0.distcp", is_async=True)


def full_disk_sync(root: Path, persistent: bool) -> dict[str, Any]:
    return _with_device_full(root, persistent, "__1_0.distcp", is_async=False)


def full_disk_for_metadata(root: Path, persistent: bool) -> dict[str, Any]:
    """ENOSPC for `.metadata`, which the coordinator alone writes."""
    return _with_device_full(root, persistent, ".metadata.tmp", is_async=True)


def full_disk_for_common(root: Path, persistent: bool) -> dict[str, Any]:
    """ENOSPC for `common.pt`, which rank 0 alone writes (part of the shards from 0.19 on)."""
    return _with_device_full(root, persistent, "common.pt", is_async=False)


def _with_device_full(root: Path, persistent: bool, name: str, is_async: bool) -> dict[str, Any]:
    trainer = Trainer(persistent=persistent)
    trainer.step()
    directory = root / f"iter_{trainer.iteration:07d}"
    if rank() == 0:
        directory.mkdir(parents=True)
        if name.endswith(".distcp"):
            faults.fill(directory, name)
        else:
            (directory / name).symlink_to("/dev/full")
    torch.distributed.barrier()

    def save() -> None:
        trainer.save(root, is_async=is_async)
        trainer.finalize()

    raised = caught(save)
    return _after_failure(trainer, root, directory, raised)


def unwritable(root: Path, persistent: bool) -> dict[str, Any]:
    """Rank 0 cannot take away an old `metadata.json`: all raise before anything is written."""
    trainer = Trainer(persistent=persistent)
    trainer.step()
    directory = root / f"iter_{trainer.iteration:07d}"
    if rank() == 0:
        (directory / "metadata.json").mkdir(parents=True)
    torch.distributed.barrier()
    raised = caught(lambda: trainer.save(root))
    torch.distributed.barrier()
    return {"raised": raised, "files": sorted(p.name for p in directory.iterdir())}


def two_jobs(root: Path, persistent: bool) -> dict[str, Any]:
    """Another process is saving to the directory."""
    trainer = Trainer(persistent=persistent)
    trainer.step()
    directory = root / f"iter_{trainer.iteration:07d}"
    fd = -1
    if rank() == 0:
        directory.mkdir(parents=True)
        fd = os.open(directory, os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX)
    torch.distributed.barrier()
    raised = caught(lambda: trainer.save(root))
    if rank() == 0:
        os.close(fd)
    torch.distributed.barrier()
    good = _then_a_good_save(trainer, root)
    return {"raised": raised, "good": good}


def two_saves(root: Path, persistent: bool) -> dict[str, Any]:
    """Two saves of one process to one directory overlap; the later one stays."""
    trainer = Trainer(persistent=persistent)
    trainer.step()
    mark = block_writer_of_rank_1(root, trainer)
    directory, _ = trainer.save(root)
    trainer.step()
    trainer.iteration -= 1  # the same directory, other values
    _, expected = trainer.save(root)
    torch.distributed.barrier()
    mark.unlink(missing_ok=True)
    raised = caught(trainer.finalize)
    good = check(directory, expected)
    load = load_outcome(trainer, directory)
    return {"raised": raised, "good": good, "load": load["type"], "lock": _locked(directory)}


def _locked(directory: Path) -> bool:
    torch.distributed.barrier()
    fd = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def directory_replaced(root: Path, persistent: bool) -> dict[str, Any]:
    """The directory is moved away while it is written, and another stands in its place."""
    trainer = Trainer(persistent=persistent)
    trainer.step()
    mark = block_writer_of_rank_1(root, trainer)
    directory, _ = trainer.save(root)
    torch.distributed.barrier()
    if rank() == 0:
        while not list(directory.glob("__0_*")):
            time.sleep(0.01)
        directory.rename(root / "moved")
        directory.mkdir()
        (root / "moved" / mark.name).unlink()
    torch.distributed.barrier()
    raised = caught(trainer.finalize)
    finished = _finished(root)
    good = _then_a_good_save(trainer, root / "next")
    return {"raised": raised, "finished": finished, "good": good}


def file_removed(root: Path, persistent: bool) -> dict[str, Any]:
    """A data file is gone when all of it was written."""
    from vime_optim.commit import sessions

    trainer = Trainer(persistent=persistent)
    trainer.step()
    usual = sessions._failure_in

    def remove(*args: Any) -> Any:
        if rank() == 1:
            for path in root.glob("iter_*/__1_*.distcp"):
                path.unlink()
        return usual(*args)

    sessions._failure_in = remove
    try:
        raised = caught(lambda: trainer.save(root, is_async=False))
    finally:
        sessions._failure_in = usual
    return {"raised": raised, "finished": _finished(root)}


def stuck_writer(root: Path, persistent: bool) -> dict[str, Any]:
    """The writers of rank 1 do not get on."""
    from vime_optim import settings

    trainer = Trainer(persistent=persistent)
    trainer.step()
    usual = settings.current()
    if rank() == 1:  # the other's writers may be slow, on a busy machine
        settings.activate(dataclasses.replace(usual, writer_timeout_s=1.5))
    gate = threading.Event()
    with writers(gate.wait):
        trainer.save(root)
        raised = caught(trainer.finalize)
    settings.activate(usual)
    finished = _finished(root)
    gate.set()
    good = _then_a_good_save(trainer, root / "next")
    return {"raised": raised, "finished": finished, "good": good}


def overwritten(root: Path, persistent: bool) -> dict[str, Any]:
    """A whole checkpoint, then a save into the same directory that does not finish."""
    trainer = Trainer(persistent=persistent)
    trainer.step()
    directory, _ = trainer.save(root)
    trainer.finalize()
    whole = load_outcome(trainer, directory)
    with writers(_no_space):
        again, _ = trainer.save(root)
        raised = caught(trainer.finalize)
    refused = load_outcome(trainer, again)
    return {"whole": whole, "raised": raised, "load": refused}


def unguarded_update(root: Path, persistent: bool) -> dict[str, Any]:
    """Code that knows nothing of the guard changes a tensor that is being written."""
    trainer = Trainer(persistent=persistent)
    trainer.step()
    with held():
        trainer.save(root)
        if rank() == 1:
            for state in torch_optimizers(trainer.optimizer)[0].state.values():
                state["exp_avg"].add_(1)
        raised = caught(trainer.finalize)
    finished = _finished(root)
    return {"raised": raised, "finished": finished}


def damaged(root: Path, persistent: bool) -> dict[str, Any]:
    """One flipped bit: named before a change with VIME_OPTIM_VERIFY=all; a cut always."""
    from vime_optim import settings

    trainer = Trainer(persistent=persistent)
    trainer.step()
    directory, _ = trainer.save(root)
    trainer.finalize()
    [path] = directory.glob("__1_*_0.distcp")
    original = path.read_bytes()
    usual = settings.current()
    settings.activate(dataclasses.replace(usual, verify="all"))
    whole = load_outcome(trainer, directory)
    torch.distributed.barrier()
    if rank() == 0:
        path.write_bytes(original[:900] + bytes([original[900] ^ 8]) + original[901:])
    torch.distributed.barrier()
    flipped = load_outcome(trainer, directory)
    settings.activate(usual)
    torch.distributed.barrier()
    if rank() == 0:
        path.write_bytes(original[:-40])
    torch.distributed.barrier()
    cut = load_outcome(trainer, directory)
    return {"whole": whole, "flipped": flipped, "cut": cut, "file": path.name}


def common_removed(root: Path, persistent: bool) -> dict[str, Any]:
    """common.pt, which rank 0 wrote first, is gone when the save ends."""
    trainer = Trainer(persistent=persistent)
    trainer.step()
    mark = block_writer_of_rank_1(root, trainer)
    directory, _ = trainer.save(root)
    torch.distributed.barrier()
    if rank() == 0:
        (directory / "common.pt").unlink()
        mark.unlink()
    raised = caught(trainer.finalize)
    return {"raised": raised, "finished": [n for n in _finished(root) if "manifest" not in n]}


def flat(root: Path, persistent: bool, rounds: int = 6) -> dict[str, Any]:
    """Many saves, sync and async in turn: what the process holds after a third of them and last."""
    trainer = Trainer(1 << 16, persistent=persistent)
    held = []
    for number in range(rounds):
        trainer.step()
        directory, expected = trainer.save(root, is_async=number % 2 == 1)
        trainer.finalize()
        wrong = check(directory, expected)
        if rank() == 0:
            shutil.rmtree(directory)
        torch.distributed.barrier()
        if number in (rounds // 3, rounds - 1):
            gc.collect()
            held.append(
                {
                    "fds": len(os.listdir("/proc/self/fd")),
                    "threads": len(os.listdir("/proc/self/task")),
                    "children": len(psutil.Process().children(recursive=True)),
                    "shared files": len(os.listdir("/dev/shm")),
                    "resident_bytes": psutil.Process().memory_info().rss,
                    "wrong": len(wrong),
                }
            )
    return {"held": held}

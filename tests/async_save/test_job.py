"""One async save in this process: which units an update copies, and that no change gets in."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from vime_optim import settings
from vime_optim.async_save import stage, units
from vime_optim.async_save.job import SaveJob
from vime_optim.files.fastfile import DigestingFile, digest_file
from vime_optim.optimizer.update_order import Owner, UpdateOrder

UNIT_BYTES = 4096


class Saved:
    """A save of two files of one tensor each, which one optimizer changes."""

    def __init__(self, folder: Path) -> None:
        self.optimizer = object()
        self.tensors = [torch.rand(5000), torch.rand(5000)]
        order = UpdateOrder()
        order.add(Owner(self.optimizer, after=False), self.tensors)
        self.results: queue.Queue[Any] = queue.Queue()
        self.paths = [folder / f"{number}.distcp" for number in range(2)]
        buckets: list[Any] = [
            (path, path.name, ([], [(SimpleNamespace(index=MetadataIndex(path.name)), tensor)]))
            for path, tensor in zip(self.paths, self.tensors, strict=True)
        ]
        self.job = SaveJob(0, buckets, self.results, order.settle())


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Saved]:
    monkeypatch.setattr(units, "UNIT_BYTES", UNIT_BYTES)
    stage.pool.release()
    found = Saved(tmp_path)
    yield found
    found.job.abort("the test is over")
    stage.pool.release()


def _give_room(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Room for `count` units, beyond what is in use."""
    values = replace(settings.current(), stage_bytes=count * UNIT_BYTES)
    monkeypatch.setattr(settings, "current", lambda: values)


def test_all_files_come_in_turn(saved: Saved) -> None:
    """Copies ahead, too, are of what the writers come to next."""
    first, second = (file.units for file in saved.job.files)
    assert saved.job.units[:4] == [first[0], second[0], first[1], second[1]]
    assert len(saved.job.units) == len(first) + len(second) > 8


def test_an_update_copies_what_the_writers_come_to_last(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    _give_room(monkeypatch, 3)
    left = saved.job._copy(saved.job.units)
    assert left == saved.job.units[:-3]
    assert {unit.state for unit in saved.job.units[-3:]} == {units.COPIED}


@pytest.mark.parametrize(("done", "slow"), [(0.0, True), (0.4, True), (0.9, False)])
def test_a_save_that_is_soon_through_is_not_helped(
    saved: Saved, monkeypatch: pytest.MonkeyPatch, done: float, slow: bool
) -> None:
    """After two seconds: at 0.4 three more are needed, at 0.9 less than a second."""
    job = saved.job
    total = job._left_bytes
    job._done_bytes = int(done * total)
    job._left_bytes = total - job._done_bytes
    monkeypatch.setattr("vime_optim.async_save.job.time.monotonic", lambda: job._began_s + 2.0)
    assert job._is_slow() == slow


@pytest.mark.parametrize("room", [0, 3, 1000])
def test_an_update_in_the_middle_of_a_write_changes_nothing(
    saved: Saved, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """The update comes when each writer holds its first unit."""
    _give_room(monkeypatch, room)
    held, go = threading.Semaphore(0), threading.Event()
    real = DigestingFile.write_vector

    def write_vector(self: DigestingFile, views: Any) -> None:
        held.release()
        go.wait()
        real(self, views)

    monkeypatch.setattr(DigestingFile, "write_vector", write_vector)
    wanted = [tensor.clone() for tensor in saved.tensors]
    saved.job.start(None)
    for _ in saved.paths:
        held.acquire()
    threading.Timer(0.2, go.set).start()
    saved.job.before_owner(saved.optimizer, after=False)
    for tensor in saved.tensors:
        tensor.fill_(7.0)
    saved.job.wait()
    results = saved.results.get()
    for number, (path, tensor) in enumerate(zip(saved.paths, wanted, strict=True)):
        record = results[number][-1].record
        assert digest_file(path).chunk_digests == record.chunk_digests
        assert tensor.numpy().tobytes() in path.read_bytes()

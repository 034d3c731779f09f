"""Reading a checkpoint with several threads gives what one thread gives."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from vime_optim.fixes import parallel_read


class Reader(dcp.FileSystemReader):
    """torch's reader with the fix, and a note of who read what at the same time."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.names: set[str] = set()
        self.hits = 0

    def read_data(self, plan: Any, planner: Any) -> Any:
        def one(self: Reader, plan: Any, planner: Any) -> Any:
            self.names.add(threading.current_thread().name)
            return dcp.FileSystemReader.read_data(self, plan, planner)

        def hit() -> None:
            self.hits += 1

        return parallel_read._wrap_read(one, hit)(self, plan, planner)


def _state(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Any] = {
        f"tensor{number}": torch.randn(50 + number, 7, generator=generator) for number in range(40)
    }
    state["scalar"] = torch.tensor(float(seed))
    return {**state, "note": {"text": f"seed {seed}"}}


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(parallel_read, "threads_of_rank", lambda: 4)
    dcp.save(_state(1), storage_writer=dcp.FileSystemWriter(tmp_path, thread_count=3), no_dist=True)
    return tmp_path


def test_every_bit_arrives(saved: Path) -> None:
    reader, loaded, expected = Reader(saved), _state(2), _state(1)
    dcp.load(loaded, storage_reader=reader, no_dist=True)
    assert reader.hits == 1
    assert len(reader.names) > 1
    assert loaded["note"] == expected["note"]
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(loaded[name].view(torch.int32), value.view(torch.int32)), name


def test_a_damaged_item_raises(saved: Path) -> None:
    victim = max(saved.glob("*.distcp"), key=lambda path: path.stat().st_size)
    with victim.open("r+b") as file:
        file.truncate(victim.stat().st_size // 2)
    with pytest.raises(dcp.api.CheckpointException):
        dcp.load(_state(2), storage_reader=Reader(saved), no_dist=True)


def test_items_in_flight_are_bounded() -> None:
    budget = parallel_read._Budget(100)
    held: list[int] = []
    most = 0
    lock = threading.Lock()

    def work(size: int) -> None:
        nonlocal most
        budget.take(size)
        with lock:
            held.append(size)
            most = max(most, sum(held) if len(held) > 1 else 0)
        with lock:
            held.remove(size)
        budget.give(size)

    sizes = [30, 60, 250, 40, 90, 10] * 20  # 250 alone is over the limit and passes by itself
    workers = [threading.Thread(target=work, args=(size,)) for size in sizes]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=30)
        assert not worker.is_alive()
    assert most <= 100

"""The counter of the memory tests sees each kind of memory, and what is freed."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from tests.memory import counted

MIB = 1 << 20


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: bytearray(8 * MIB),
        lambda: np.empty(8 * MIB, np.uint8),
        lambda: torch.empty(8 * MIB, dtype=torch.uint8),
        lambda: torch.zeros(2 * MIB, dtype=torch.float32),
        lambda: torch.ones(MIB).double(),
    ],
)
def test_each_kind_is_seen(allocate: object) -> None:
    with counted() as memory:
        held = allocate()  # type: ignore[operator]
        del held
    assert 8 * MIB <= memory.peak_bytes <= 13 * MIB


def test_what_is_freed_counts_no_more() -> None:
    with counted() as memory:
        for _ in range(8):
            torch.ones(MIB)
            bytearray(MIB)
    assert 5 * MIB <= memory.peak_bytes < 12 * MIB


def test_views_count_once_and_threads_are_seen() -> None:
    source = np.zeros(8 * MIB, np.uint8)
    with counted() as memory:
        view = torch.from_numpy(source).view(torch.float32)[16:].view(-1, 16)
        view.add_(1.0)
    assert memory.peak_bytes < MIB
    with counted() as memory:
        thread = threading.Thread(target=lambda: np.empty(8 * MIB, np.uint8).sum())
        thread.start()
        thread.join()
    assert memory.peak_bytes >= 8 * MIB

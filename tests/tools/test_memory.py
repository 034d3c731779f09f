"""Every command stays within its budget on a checkpoint larger than the budget."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.memory import counted
from tests.tools.synthetic import write_dcp, write_synthetic
from vime_optim.cli import main
from vime_optim.files.geometry import whole
from vime_optim.tools.reader import Checkpoint

MIB = 1 << 20
BUDGET = 32 * MIB
TENSOR = 32 * MIB

Paths = tuple[Path, Path]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    """Two checkpoints of 128 MiB with the same values in another sharding."""
    root = tmp_path_factory.mktemp("large")
    shape = (4096, 2048)
    write_synthetic(root / "a", tensors=4, shape=shape, chunks=(3, 1))
    write_synthetic(root / "b", tensors=4, shape=shape, chunks=(1, 2))
    return root / "a", root / "b"


@pytest.fixture(scope="module", autouse=True)
def _loaded_code(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every command once on a tiny checkpoint: code that is loaded on first use is no data."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny = write_dcp(folder / "tiny", {"w": torch.ones(2)})
    for name in ("inspect", "diff", "repair", "export", "import"):
        words = COMMANDS[name]((tiny, tiny), folder / "export", folder / name)
        if name == "export":
            words[-1] = str(folder / "export")
        assert run(words) == 0, words


@pytest.fixture(scope="module")
def exported(large: Paths, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "export"
    assert run(["export", str(large[0]), "--out", str(folder), "--model"]) == 0
    return folder


def run(words: list[str]) -> int:
    with contextlib.redirect_stdout(io.StringIO()):
        return main(words)


def peak_bytes(words: list[str]) -> int:
    with counted() as memory:
        assert run(words) == 0, words
    return memory.peak_bytes


def test_the_checkpoint_is_larger_than_the_budget(large: Paths) -> None:
    for folder in large:
        assert sum(path.stat().st_size for path in folder.iterdir()) >= 4 * BUDGET


COMMANDS: dict[str, Callable[[Paths, Path, Path], list[str]]] = {
    "inspect": lambda large, export, out: ["inspect", str(large[0])],
    "diff": lambda large, export, out: ["diff", *map(str, large)],
    "repair": lambda large, export, out: [
        *("repair", str(large[0]), "--copy", "--out", str(out)),
    ],
    "export": lambda large, export, out: [
        *("export", str(large[0]), "--model", "--out", str(out)),
    ],
    "import": lambda large, export, out: ["import", str(export), "--out", str(out)],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_stays_within_its_budget(
    name: str, large: Paths, exported: Path, tmp_path: Path
) -> None:
    words = COMMANDS[name](large, exported, tmp_path / "out")
    budget = [] if name == "inspect" else ["--memory-bytes", str(BUDGET)]
    assert peak_bytes([*words, *budget]) <= BUDGET


@pytest.mark.parametrize("name", ["diff", "export", "import"])
def test_the_budget_decides_how_much_is_held(
    name: str, large: Paths, exported: Path, tmp_path: Path
) -> None:
    """Blocks grow and shrink with it: a budget that nobody looks at would not do that."""
    held = {}
    for budget in (4 * MIB, 512 * MIB):
        words = COMMANDS[name](large, exported, tmp_path / f"out{budget}")
        held[budget] = peak_bytes([*words, "--memory-bytes", str(budget)])
    assert held[4 * MIB] <= 4 * MIB + 2 * MIB  # the parsed metadata and the code's own needs
    assert held[512 * MIB] > 2 * held[4 * MIB]


def test_the_measurement_sees_a_whole_tensor(large: Paths) -> None:
    """The limit means something: one tensor read whole is already at it."""
    with counted() as memory, Checkpoint(large[0]) as checkpoint:
        entry = checkpoint.tensors["weight_0"]
        checkpoint.read_box(entry, whole((4096, 2048)))
    assert memory.peak_bytes >= TENSOR

"""Every command stays within its budget on a checkpoint larger than the budget."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.synthetic import write_synthetic

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
BUDGET = 32 * MIB

MEASURE = """
import contextlib, io, json, os, sys, tempfile, threading, psutil
import torch
from pathlib import Path
from tests.checkpoint.synthetic import write_dcp
from vime_optim.checkpoint import cli
# Once on a tiny checkpoint: code that is loaded on first use is no tensor data.
with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
    tiny = str(write_dcp(Path(folder) / "tiny", {"w": torch.ones(2)}))
    for words in (
        ["inspect", tiny], ["diff", tiny, tiny], ["repair", tiny, "--out", folder + "/r"],
        ["export", tiny, "--model", "--out", folder + "/e"],
        ["import", folder + "/e", "--out", folder + "/i"],
    ):
        assert cli.main(words) == 0, words
def measure(words):
    process = psutil.Process()
    start = peak = process.memory_info().rss
    done = threading.Event()
    def sample():
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, process.memory_info().rss)
    thread = threading.Thread(target=sample)
    thread.start()
    status = cli.main(words)
    done.set()
    thread.join()
    return {"status": status, "grown": max(peak, process.memory_info().rss) - start}
# A process of its own for each command, without the imports of one.
for words in json.loads(sys.argv[1]):
    sys.stdout.flush()
    if os.fork() == 0:
        print(json.dumps(measure(words)), flush=True)
        os._exit(0)
    os.wait()
"""


def grown_bytes(commands: list[list[str]], script: str = MEASURE) -> list[int]:
    """How much each command's resident set grows, one after the other, each in its own process."""
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(commands)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # threads of OpenMP survive no fork
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"status"')]
    assert [result["status"] for result in found] == [0] * len(commands), done.stdout + done.stderr
    return [int(result["grown"]) for result in found]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints of 128 MiB with the same values in another sharding."""
    root = tmp_path_factory.mktemp("large")
    shape = (4096, 2048)
    write_synthetic(root / "a", tensors=4, shape=shape, chunks=(3, 1))
    write_synthetic(root / "b", tensors=4, shape=shape, chunks=(1, 2))
    return root / "a", root / "b"


def test_the_checkpoint_is_larger_than_the_budget(large: tuple[Path, Path]) -> None:
    for folder in large:
        assert sum(path.stat().st_size for path in folder.iterdir()) >= 4 * BUDGET


def test_commands_stay_within_their_budget(large: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = map(str, large)
    budget = ["--memory-bytes", "32MiB"]
    export, made = str(tmp_path / "export"), str(tmp_path / "made")
    commands = {
        "inspect": ["inspect", a],
        "diff": ["diff", a, b, *budget],
        "repair": ["repair", a, "--out", str(tmp_path / "r"), "--copy", *budget],
        "export": ["export", a, "--out", export, "--model", *budget],
        "import": ["import", export, "--out", made, *budget],
        "diff with what was made": ["diff", a, made, *budget],
    }
    grown = dict(zip(commands, grown_bytes(list(commands.values())), strict=True))
    assert max(grown.values()) <= BUDGET, {k: f"{v / MIB:.1f} MiB" for k, v in grown.items()}


def test_the_measurement_sees_a_whole_tensor() -> None:
    """The limit means something: one tensor read whole is already over it."""
    script = MEASURE.replace("cli.main(words)\n", "len(torch.ones(16 << 20)) * 0\n")
    assert script != MEASURE
    assert grown_bytes([[]], script)[0] > BUDGET

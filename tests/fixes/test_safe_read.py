"""Hostile directories against a load with install(), on two ranks, and against every tool."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.memory import at_most
from tests.tools.conftest import copy_of, stock  # noqa: F401  (fixtures)
from tests.writer.hostile import SIGN, changes
from tests.writer.launch import launch, results, tree_of
from vime_optim.cli import main
from vime_optim.files.fastfile import digest_file
from vime_optim.files.manifest import Manifest

MATRIX = pytest.mark.matrix
HARMLESS = {"objects hold themselves", "objects share themselves"}
"""Plain containers, if odd, which may be loaded."""

ANY_ANSWER = {"no optimizer", "digests of 0 alone", "digests of f alone", *HARMLESS}
"""A save of the model alone is one too, and `check` and a load compare digests: another tool may
find nothing wrong with these."""


@pytest.mark.parametrize("release", ["0.19.2", pytest.param("0.16.1", marks=MATRIX)])
def test_no_attack_gets_through_a_load(release: str, tmp_path: Path) -> None:
    """Ours on every rank, nothing run, nothing changed, without much memory."""
    everything = {"VIME_OPTIM_TEST_ALL": "1"}
    arguments = {"root": str(tmp_path)}
    outcomes = launch(tree_of(release), "attacks", arguments=arguments, environment=everything)
    for rank in results(outcomes):
        assert rank.keys() == changes().keys()
        for name, seen in rank.items():
            assert seen["ours"] or (name in HARMLESS and seen["type"] is None), (name, seen)
            assert not seen["ran"], name
            assert seen["unchanged"] or not seen["ours"], name
            assert "weights_only=False" not in seen["text"], name
            assert "weights_only" not in seen["text"] or "add_safe_globals" in seen["text"], name
            assert seen["held_bytes"] < 64 << 20, (name, seen)
        assert "no optimizer state is in this checkpoint" in rank["no optimizer"]["text"]
        assert "no plain file" in rank["data is a pipe"]["text"]
        assert "posix.mkdir" in rank["metadata runs code"]["text"]


@pytest.mark.parametrize("name", sorted(changes()))
def test_no_attack_gets_through_a_tool(
    name: str,
    stock: Callable[[str], Path],  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = Path(shutil.copytree(stock("full_0.19.2"), tmp_path / "dir" / "iter_0000003"))
    manifest = Manifest()
    for path in sorted(folder.iterdir()):
        manifest.add(digest_file(path))
    manifest.write(folder)
    before = {path.name for path in tmp_path.iterdir()}
    changes()[name](folder)
    commands = {
        "inspect": ["inspect", str(folder), "--tree"],
        "check": ["check", str(folder)],
        "diff": ["diff", str(folder), str(folder)],
        "repair": ["repair", str(folder), "--out", str(tmp_path / "dir" / "r")],
        "export": ["export", str(folder), "--model", "--out", str(tmp_path / "dir" / "e")],
        "import": ["import", str(folder), "--out", str(tmp_path / "dir" / "i")],
    }
    with at_most(256 << 20):
        answers = {tool: main(words) for tool, words in commands.items()}
    output = capsys.readouterr()
    assert "Traceback" not in output.out + output.err
    assert "unexpectedly" not in output.err
    assert set(answers.values()) <= {0, 1, 2}
    assert answers["import"] == 2
    if "manifest" in name or name.startswith("chunks of"):
        assert answers["check"] == 2, answers
    elif name not in ANY_ANSWER:
        assert {answers[tool] for tool in ("inspect", "diff", "repair", "export")} != {0}, answers
    assert not (folder.parent / SIGN).exists()
    assert {path.name for path in tmp_path.iterdir()} == before

"""The tools say what they do, what a path is, and never cut a name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.tools.conftest import Unpack
from vime_optim import cli
from vime_optim.tools.common import GroupSource, OptimizerFacts

Capture = pytest.CaptureFixture[str]


def refusal(path: Path, capsys: Capture) -> str:
    assert cli.main(["inspect", str(path)]) == 2
    return capsys.readouterr().err


def test_each_kind_of_path_has_its_sentence(stock: Unpack, tmp_path: Path, capsys: Capture) -> None:
    source = stock("full_0.16.1")
    model = tmp_path / "hf"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"\0" * 8)
    plain = tmp_path / "plain"
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=plain, no_dist=True)
    legacy = tmp_path / "legacy"
    (legacy / "mp_rank_00").mkdir(parents=True)
    said = [
        refusal(model, capsys),
        refusal(plain, capsys),
        refusal(legacy, capsys),
        refusal(source / ".metadata", capsys),
        refusal(model / "config.json", capsys),
        refusal(tmp_path / "nothing", capsys),
    ]
    for text, words in zip(
        said,
        (
            "a Hugging Face model directory",
            "a plain torch.distributed.checkpoint directory",
            "--ckpt-format torch ",
            f"Give the directory: {source}",
            "This is a file, not a checkpoint directory",
            "There is nothing at this path",
        ),
        strict=True,
    ):
        assert words in text
    assert len({text.splitlines()[0] for text in said}) >= 5


def test_a_root_is_followed_to_its_latest_save(
    stock: Unpack, tmp_path: Path, capsys: Capture
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "iter_0000003").symlink_to(stock("full_0.16.1"))
    latest = root / "latest_checkpointed_iteration.txt"
    latest.write_text("3\n")
    assert cli.main(["diff", str(root), str(stock("full_0.16.1"))]) == 0
    capsys.readouterr()
    for word in ("4", "../..", "", "metastring"):
        latest.write_text(word)
        assert "names a save that is not there" in refusal(root, capsys)


def test_export_and_import_say_what_is_left_out(
    stock: Unpack, tmp_path: Path, capsys: Capture
) -> None:
    source = str(stock("full_0.16.1"))
    for model in (False, True):
        out, new = (str(tmp_path / f"{name}{model}") for name in ("out", "new"))
        assert cli.main(["export", source, "--out", out, *(["--model"] if model else [])]) == 0
        exported = capsys.readouterr().out
        assert cli.main(["import", out, "--out", new]) == 0
        imported = capsys.readouterr().out
        assert ("--model adds them" in exported) is not model
        assert ("optimizer state only" in imported) is not model
        assert cli.main(["diff", source, new]) == (0 if model else 1)
        told = capsys.readouterr().out.splitlines()[-1]
        assert model or "only in a" in told
    assert "weights" in cli.COMMANDS["export"]


def test_errors_as_json_keep_what_was_expected(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "empty").mkdir()
    assert cli.main(["inspect", "--json", str(tmp_path / "empty")]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert "a directory with .metadata" in error["expected"]
    assert set(error) == {"what", "where", "got", "expected", "next_step", "text"}


def test_names_are_whole_and_columns_are_filled(
    stock: Unpack, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = stock("full_0.16.1")
    cli.main(["inspect", "--json", "--tree", str(source)])
    names = {item["key"] for item in json.loads(capsys.readouterr().out)["tree"]}
    longest = {}
    for columns in ("60", "80", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        cli.main(["inspect", "--tree", str(source)])
        lines = capsys.readouterr().out.splitlines()
        assert names <= {line.strip() for line in lines}
        prose = [line for line in lines if len(line.split()) > 4]
        longest[columns] = max(map(len, prose))
        assert longest[columns] <= int(columns)
    assert longest["60"] < longest["80"]


def test_a_closed_pipe_ends_quietly(stock: Unpack) -> None:
    command = [sys.executable, "-m", "vime_optim", "inspect", "--tree", str(stock("full_0.16.1"))]
    reader, writer = os.pipe()
    os.close(reader)  # `| head` that is already gone
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_cpu_offload_is_named_in_what_install_saves() -> None:
    """The groups of a save under install(), which leaves out the keys that name the classes."""
    common = {"lr": 0.02, "weight_decay": 0.06, "betas": (0.9, 0.999), "eps": 1e-8, "step": 3}

    def named(offload: bool = False, **keys: object) -> str | None:
        source = GroupSource("optimizer", None, {"param_groups": [{**common, **keys}]})
        return OptimizerFacts(sources=[source], cpu_offload=offload).backend

    assert named(bias_correction=True, fused=True) == "HybridDeviceOptimizer (CPU offload)"
    assert named(offload=True, amsgrad=False) == "HybridDeviceOptimizer (CPU offload)"
    assert named(bias_correction=True) == "FusedAdam (Transformer Engine or Apex)"
    assert named(amsgrad=False, fused=True) == "torch Adam or AdamW"

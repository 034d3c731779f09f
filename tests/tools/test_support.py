"""The table of versions that go together, held against the releases' own files."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from packaging.version import Version

from tests.clients import trees
from vime_optim.tools import support
from vime_optim.tools.megatron_source import RELEASES, fetch

ROOT = Path(__file__).parents[2]
GOOD = {"torch": "2.13.0+cpu", "python": (3, 12), "has_training": True, "nvrx": None}


@pytest.mark.parametrize("release", RELEASES)
def test_what_the_wheels_ask_for(release: str) -> None:
    row = support.of(Version(release))
    assert row is not None
    (metadata,) = fetch(release).glob("megatron_core-*.dist-info/METADATA")
    text = metadata.read_text()
    python = re.search(r"^Requires-Python: >=([\d.]+)", text, re.M)
    assert python is not None
    assert python.group(1) == row.python
    torch_asked = re.search(r"^Requires-Dist: torch>=([\d.]+)", text, re.M)
    assert torch_asked is not None
    assert Version(torch_asked.group(1)) <= Version(row.torch)
    loader = (fetch(release) / "megatron/core/dist_checkpointing/strategies/torch.py").read_text()
    calls_load = re.search(r"checkpoint\.load\((?:[^()]|\([^()]*\))*no_dist=True", loader)
    assert bool(calls_load) == (row.torch == "2.7"), "torch 2.6 has no load(no_dist=)"
    asks_nvrx = (fetch(release) / "megatron/core/dist_checkpointing/strategies/nvrx.py").exists()
    assert asks_nvrx == (row.nvrx is not None)


def test_this_torch_can_load_as_the_newest_ask() -> None:
    has_it = "no_dist" in inspect.signature(dcp.load).parameters
    assert has_it == (Version(torch.__version__).release >= (2, 7))


@pytest.mark.parametrize("name", trees.TREES)
def test_what_the_main_loops_ask_of_python(name: str) -> None:
    try:
        tree = trees.find(name)
    except trees.NoTree as missing:
        pytest.skip(f"clients: {missing}")
    info = (tree / "megatron/core/package_info.py").read_text()
    numbers = re.findall(r"^(?:MAJOR|MINOR) = (\d+)", info, re.M)
    row = support.of(Version(".".join(numbers)))
    assert row is not None
    sources = (tree / "megatron/training").rglob("*.py")
    wants_override = any(
        re.search(r"^from typing import .*\boverride\b", file.read_text(), re.M) for file in sources
    )
    assert wants_override == (row.training == "3.12")


@pytest.mark.parametrize(
    ("megatron", "changed", "said"),
    [
        ("0.15.3", {"torch": "2.6.0"}, []),
        ("0.17.1", {"torch": "2.6.0+cu124", "python": (3, 10)}, []),
        ("0.18.2", {"torch": "2.6.0"}, ["no_dist"]),
        ("0.18.2", {"torch": "2.7.0", "nvrx": "0.6.0", "python": (3, 11)}, []),
        ("0.17.1", {"nvrx": "0.4.1"}, ["nvidia-resiliency-ext"]),
        ("0.16.1", {"nvrx": "0.4.1"}, []),
        ("0.19.2", {"torch": "2.6.0", "nvrx": "0.4.1"}, ["no_dist", "nvidia-resiliency-ext"]),
        ("0.19.1", {"python": (3, 11)}, ["typing.override"]),
        ("0.19.1", {"python": (3, 11), "has_training": False}, []),
        ("0.19.2", {"nvrx": "0.6.0"}, []),
        ("0.21.0rc1", {"torch": "2.6.0"}, ["no_dist"]),
        ("0.16.0rc0", {"torch": "2.5.1"}, ["torch 2.6"]),
        ("0.14.0", {"torch": "2.5.1"}, []),
    ],
)
def test_what_does_not_go_together(
    megatron: str, changed: dict[str, object], said: list[str]
) -> None:
    found = support.problems(Version(megatron), **{**GOOD, **changed})
    assert len(found) == len(said), found
    for text, word in zip(found, said, strict=True):
        assert word in text
        assert megatron in text


def test_the_docs_show_this_table() -> None:
    assert support.markdown() in (ROOT / "docs" / "matrix.md").read_text()

"""Flipped bits in data files against a load with install(), on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.writer.launch import launch, results, tree_of

RELEASES = ["0.19.2", pytest.param("0.16.1", marks=pytest.mark.matrix)]


def flipped(release: str, **arguments: Any) -> list[list[dict[str, Any]]]:
    everything = {"VIME_OPTIM_TEST_ALL": "1"}
    return results(launch(tree_of(release), "flips", arguments=arguments, environment=everything))


@pytest.mark.parametrize("release", RELEASES)
def test_no_flipped_bit_is_loaded(release: str, tmp_path: Path) -> None:
    """By default: an error on every rank that names the file and a range, or all is exact."""
    ranks = flipped(release, root=str(tmp_path), count=40)
    for seen in zip(*ranks, strict=True):
        assert len({case["type"] for case in seen}) == 1, seen
        for case in seen:
            assert case["type"] == "CheckpointError" or case["exact"], case
            if case["type"]:
                assert case["file"] in case["text"], case
    raised = [case for case in ranks[0] if case["type"]]
    assert len(raised) > 35  # the rest hit what lies between items and counts for nothing
    digests = [case for case in raised if "digest differs" in case["text"]]
    assert len(digests) > 25
    assert all("bytes [0, " in case["text"] and "holding" in case["text"] for case in digests)


def test_without_digests_some_are_loaded(tmp_path: Path) -> None:
    ranks = flipped("0.19.2", root=str(tmp_path), count=15, verify="off")
    assert any(case["type"] is None and not case["exact"] for rank in ranks for case in rank)

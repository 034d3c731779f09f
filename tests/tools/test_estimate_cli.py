"""`vime-optim plan`: arguments, table and JSON."""

from __future__ import annotations

import argparse
import json

import pytest

from vime_optim.tools.estimate.plan_command import add_plan_arguments, run_plan


def run(capsys, *argv):
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    code = run_plan(parser.parse_args(argv))
    out, err = capsys.readouterr()
    return code, out, err


def test_table_fits_80_columns(capsys):
    code, out, _ = run(
        capsys, "--preset", "Qwen3-30B-A3B", "--tp", "4", "--pp", "4", "--ep", "16",
        "--world-size", "128",
    )  # fmt: skip
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    for text in ("30.53 billion", "128 ranks", "Checked: 128 plans", "stock"):
        assert text in out


def test_json_has_the_figures(capsys):
    code, out, err = run(capsys, "--preset", "Qwen3-0.6B", "--dp", "4", "--json", "--no-progress")
    assert (code, err) == (0, "")
    got = json.loads(out)
    assert got["model_numel"] == 596_049_920
    assert got["per_rank"]["own_bytes"]["sum"] == 12 * 596_049_920
    assert got["per_rank"]["own_bytes"]["max"] == 3 * 596_049_920
    assert got["checked"] is True
    assert got["ours_extra_host_bytes"] == 0
    assert got["planner"]["peak_rss_bytes"] > 0


def test_explicit_shape_and_progress(capsys):
    argv = "--layers 2 --hidden 24 --heads 4 --kv-groups 2 --head-dim 6 --ffn 20 --vocab 50"
    code, out, err = run(
        capsys, *argv.split(), "--tied", "--no-qk-norm", "--dp", "3", "--cp", "2", "--no-check",
        "--bucket-size", "500", "--json", "--progress",
    )  # fmt: skip
    assert code == 0
    assert "6/6" in err
    got = json.loads(out)
    assert got["checked"] is False
    assert got["layout"]["world_size"] == 6
    assert got["layout"]["overlap"] is True
    assert got["model"]["tied"] is True
    assert got["model"]["qk_norm"] is False
    assert got["per_rank"]["padding_bytes"]["sum"] > 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--preset Qwen3-0.6B --tp 16", "KV groups cannot be divided"),
        ("--hidden 8", "no --layers, --heads"),
        ("--preset Qwen3-0.6B --dp 3 --world-size 4", "contradict"),
        ("--preset Qwen3-0.6B --tp 2 --world-size 5", "does not divide"),
        ("--preset Qwen3-0.6B --tp 0", "does not divide"),
        ("--preset Qwen3-0.6B --pp 40 --dp 1", "28 layers cannot be divided"),
    ],
)
def test_impossible_requests_say_why(capsys, argv, message):
    code, out, err = run(capsys, *argv.split())
    assert (code, out) == (1, "")
    assert message in err

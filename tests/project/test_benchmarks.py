"""What `python -m benchmarks` runs, what fits, how parts are timed, and what its report says."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import fit, parts, plots, save_load, state, tables
from benchmarks.configurations import Configuration, asked_for, parse_run, that_fit
from benchmarks.report import DP, FULLY, OURS, host_peak_bytes, paired, spread

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
GIB_256 = 262 * 10**9  # what is available of 256 GiB, about


def configurations(words: str) -> list[Configuration]:
    return asked_for(save_load._parse(words.split()))


def test_run_overrides_what_is_common_to_all() -> None:
    found = configurations(
        "--repeats 3 --fully-rounds 2"
        " --run 1.2b/hybrid --run 8b/fused,rounds=5,fully=1,only=ours+dp"
    )
    assert found == [
        Configuration("1.2b", "hybrid", 3, 2, (FULLY, DP, OURS)),
        Configuration("8b", "fused", 5, 1, (DP, OURS)),
    ]


def test_sizes_and_backends_come_before_runs() -> None:
    words = "--size 2m --size 45m --backend fused --only ours --run 2m/hybrid,only=fully"
    assert [(one.size, one.backend, one.variants) for one in configurations(words)] == [
        ("2m", "fused", (OURS,)),
        ("45m", "fused", (OURS,)),
        ("2m", "hybrid", (FULLY,)),
    ]
    assert [(one.size, one.backend) for one in configurations("")] == [
        ("45m", "hybrid"),
        ("45m", "fused"),
    ]


@pytest.mark.parametrize(
    "text", ["2m", "2m/hybrid,3", "2m/hybrid,rounds=x", "2m/hybrid,only=all", "2m/hybrid,full=1"]
)
def test_wrong_run_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_run(text)


@pytest.mark.parametrize("run", ["3m/hybrid", "2m/adam"])
def test_unknown_name_is_refused(run: str) -> None:
    with pytest.raises(SystemExit, match=r"is none of"):
        configurations(f"--run {run}")


def recorded(name: str) -> Iterator[dict[str, Any]]:
    yield from json.loads((RESULTS / f"{name}.json").read_text())["configurations"]


@pytest.mark.parametrize("name", ["h200", "h200_2.6b", "h200_8b"])
def test_parameters_are_those_that_were_measured(name: str) -> None:
    for entry in recorded(name):
        assert fit.parameters(entry["size"]) == entry["parameters"]


@pytest.mark.parametrize(
    ("name", "size", "variants"),
    [
        ("h200", "1.2b", (FULLY, DP, OURS)),
        ("h200_2.6b", "2.6b", (FULLY, DP, OURS)),
        ("h200_8b", "8b", (OURS,)),
    ],
)
def test_predicted_memory_is_near_what_was_measured(
    name: str, size: str, variants: tuple[str, ...]
) -> None:
    (entry,) = (one for one in recorded(name) if (one["size"], one["backend"]) == (size, "hybrid"))
    for variant in variants:
        measured = host_peak_bytes(entry, variant)
        assert measured is not None
        predicted = fit.host_bytes(size, "hybrid", variant, 2, "cuda")
        assert 0.85 < predicted / measured < 1.15


@pytest.mark.parametrize(
    ("size", "fitting"),
    [("1.2b", {FULLY, DP, OURS}), ("2.6b", {FULLY, DP, OURS}), ("4b", {DP, OURS}), ("8b", {OURS})],
)
def test_sizes_are_the_largest_for_their_variants(size: str, fitting: set[str]) -> None:
    needed = {v: fit.host_bytes(size, "hybrid", v, 2, "cuda") for v in (FULLY, DP, OURS)}
    assert {variant for variant in needed if needed[variant] < GIB_256} == fitting


def test_8b_has_about_8e9_parameters() -> None:
    assert abs(fit.parameters("8b") - 8.0e9) < 0.05e9
    assert abs(fit.parameters("2.6b") - 2.6e9) < 0.05e9


def test_what_does_not_fit_is_left_out_or_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    free = fit.host_bytes("2m", "hybrid", OURS, 2, "cpu")
    monkeypatch.setattr(fit, "available_bytes", lambda: free)
    one = Configuration("2m", "hybrid", 1, 1, (FULLY, OURS))
    (kept,) = that_fit([one], ranks=2, device="cpu", folder=tmp_path)
    assert kept.variants == (OURS,)
    assert len(kept.left_out) == 1
    assert kept.left_out[0].startswith(f"{FULLY}: needs about")
    monkeypatch.setattr(fit, "available_bytes", lambda: free - 1)
    with pytest.raises(SystemExit, match="does not fit"):
        that_fit([one], ranks=2, device="cpu", folder=tmp_path)


@pytest.mark.parametrize("numel", [0, 1, 4, 5, 8, 11])
def test_sum_by_parts_is_the_sum(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_SUM_NUMEL", 4)
    flat = torch.arange(numel, dtype=torch.int32) * 200_000_000
    assert state._sum(flat) == sum(flat.tolist())


class Stages:
    """Two nested stages; each call of `tick` takes one second."""

    @staticmethod
    def outer(tick: Any) -> str:
        tick()
        Stages.inner(tick)
        tick()
        return "done"

    @staticmethod
    def inner(tick: Any) -> None:
        tick()


class Heir(Stages):
    pass


def test_nested_parts_are_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(parts, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))

    def tick() -> None:
        now[0] += 1.0

    before = dict(vars(Stages))
    clock = parts.Clock()
    table = (
        (__name__, "Stages.outer", "plan"),
        (__name__, "Stages.inner", "files"),
        (__name__, "Stages.not_in_this_release", "read"),
        ("no_such_module", "f", "read"),
    )
    with parts.timed(clock, table):
        assert Stages.outer(tick) == "done"
    assert clock.seconds == {"plan": 2.0, "files": 1.0}
    assert dict(vars(Stages)) == before


def test_inherited_function_is_inherited_again() -> None:
    with parts.timed(parts.Clock(), ((__name__, "Heir.inner", "plan"),)):
        assert "inner" in vars(Heir)
    assert "inner" not in vars(Heir)


def test_parts_name_functions_that_vime_optim_has() -> None:
    ours = [row for row in parts.TABLE if row[0].startswith("vime_optim.")]
    assert ours
    for module, name, part in ours:
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        tree = ast.parse(Path(spec.origin).read_text())
        imported = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        known = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in known | {alias.name for node in imported for alias in node.names}
        assert part in parts.PARTS


def phase(seconds: float, part: str) -> dict[str, Any]:
    return {
        **{"seconds": [seconds, 0.5 * seconds], "host_extra_bytes": [0, 0]},
        **{"host_peak_bytes": [10, 10], "device_extra_bytes": [0, 0]},
        **{"sent_bytes": [0, 0], "read_bytes": [8, 8]},
        "parts": [{part: 0.75 * seconds}, {part: 0.25 * seconds}],
    }


def turn(number: int, variant: str, seconds: float) -> dict[str, Any]:
    save = {"build": phase(seconds, "plan"), "write": phase(seconds, "files")}
    load = {"template": phase(1, "plan"), "read": phase(1, "read"), "restore": phase(1, "state")}
    same = {"own_bytes": [8, 8], "held_bytes": [8, 8], "states": [3, 3], "wrong_states": [0, 0]}
    return {
        **{"round": str(number), "variant": variant},
        **{"save": {**save, "stored_bytes": [28, 28]}, "load": {**load, **same}},
    }


def result(turns: list[dict[str, Any]]) -> dict[str, Any]:
    entry = {"size": "2m", "backend": "hybrid", "parameters": 2, "own_bytes": [8, 8]}
    hardware = {"device": "none", "processor": "none", "cores": 1, "file_system": "tmpfs"}
    return {
        **{"commit": "0", "date": "today", "versions": {}, "hardware": hardware, "ranks": 2},
        "configurations": [{**entry, "model_bytes": 4, "turns": turns, "left_out": ["fully: big"]}],
    }


def test_report_invents_nothing_for_a_missing_variant() -> None:
    found = result([turn(0, DP, 2.0), turn(1, DP, 4.0), turn(1, OURS, 1.0)])
    text = tables.markdown(found)
    rows = {line.split(" | ")[0]: line for line in text.splitlines()}
    assert rows[f"| {FULLY}"].count("not run") >= 2
    assert "x" not in rows["| save, stock fully_reshardable against ours"].split("|")[3]
    assert rows["| save, against stock dp_reshardable"].endswith("| 0.33x (1 and 2 turns) |")
    assert "| save | stock dp_reshardable | 1 | 0.250x (once) |" in text
    assert "- left out: fully: big" in text
    assert "2.00 s (once)" in rows[f"| {OURS}"]
    assert "| build | plan | - | 2.250 | 0.750 |" in text
    assert "| build | other | - | 0.750 | 0.250 |" in text


def test_plots_say_which_variants_were_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: dict[str, list[str]] = {}

    def finish(figure: Any, result: Any, entry: Any, path: Path, **_: Any) -> None:
        texts[path.name] = [text.get_text().strip() for axis in figure.axes for text in axis.texts]

    monkeypatch.setattr(plots, "_finish", finish)
    tables.write_all(result([turn(0, OURS, 1.0)]), tmp_path / "x.json", None)
    absent = ["not run", "not run"]
    times = [*absent, "2.00 s\n(once)", *absent, "3.00 s\n(once)"]
    assert texts["x_2m_hybrid.png"] == [*times, *absent, "0.00", "0.00"]
    assert texts["x_2m_hybrid_parts.png"] == [*absent, "2.00 s", *absent, "3.00 s"]


def test_pairs_are_of_the_same_round() -> None:
    turns = [turn(0, OURS, 1.0), turn(0, DP, 4.0), turn(1, DP, 2.0), turn(2, OURS, 3.0)]
    turns += [{**turn(3, OURS, 1.0), "save": {"error": "no"}}, turn(3, DP, 1.0)]
    assert paired({"turns": turns}, "save", OURS, DP) == [0.25]


def test_one_run_is_no_median() -> None:
    assert spread([1.0]) == "1.00 s (once)"
    assert spread([2.0, 1.0]) == "2.00 and 1.00 s"
    assert spread([3.0, 1.0, 2.0]) == "2.00 s (1.00 to 3.00)"

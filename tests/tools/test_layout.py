"""Parameters in flat buckets: found by order, proved by value, never guessed. And odd tensors."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools.synthetic import write_dcp
from vime_optim.errors import CheckpointError
from vime_optim.files.geometry import tiles, whole
from vime_optim.tools.diff import DIFFERENT, EQUAL, diff_checkpoints
from vime_optim.tools.export import export_checkpoint
from vime_optim.tools.inspect import inspect_checkpoint
from vime_optim.tools.logical import View, open_view
from vime_optim.tools.reader import Checkpoint

STEM = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32)."


def bucket(*masters: torch.Tensor) -> torch.Tensor:
    """Masters one after the other, each on 64 elements, with nonsense between them."""
    parts: list[torch.Tensor] = []
    for master in masters:
        filled = sum(part.numel() for part in parts)
        parts += [torch.full((-filled % 64,), 123.0), master.flatten()]
    return torch.cat(parts)


def write(folder: Path, model: dict[str, torch.Tensor], param: torch.Tensor) -> Path:
    tensors = dict(model)
    tensors[f"{STEM}bucket_idx_0.param"] = param
    tensors[f"{STEM}bucket_idx_0.exp_avg"] = torch.arange(param.numel(), dtype=torch.float32)
    return write_dcp(folder, tensors)


def masters(*counts: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(count, generator=generator) for count in counts]


def read_whole(view: View, name: str) -> np.ndarray:
    return view.read(view.tensors[name], whole(view.tensors[name].shape))


def moments(view: View, key: str) -> list[float]:
    bits = read_whole(view, f"optimizer.state.exp_avg.{key}")
    return bits.view(np.float32).reshape(-1).tolist()


def test_equal_weights_are_told_apart_by_order(tmp_path: Path) -> None:
    """Norm weights of ones, say: the last module stands first in the buffer."""
    ones, other = torch.ones(10), masters(30)[0]
    model = {"a": ones.bfloat16(), "b": ones.bfloat16(), "c": other.bfloat16()}
    folder = write(tmp_path / "c", model, bucket(other, ones, ones))
    with Checkpoint(folder) as checkpoint:
        view = open_view(checkpoint)
        assert view.layout_problem is None
        assert moments(view, "c") == list(range(30))
        assert moments(view, "b") == list(range(64, 74))
        assert moments(view, "a") == list(range(128, 138))


def test_equal_weights_out_of_order_are_not_guessed(tmp_path: Path) -> None:
    ones, other = torch.ones(10), masters(30)[0]
    model = {"a": ones.bfloat16(), "b": ones.bfloat16(), "c": other.bfloat16()}
    folder = write(tmp_path / "c", model, bucket(ones, ones, other))
    with Checkpoint(folder) as checkpoint:
        problem = open_view(checkpoint).layout_problem
    assert problem is not None
    assert "match no weight, or several" in problem


def test_distinct_weights_out_of_order_are_found(tmp_path: Path) -> None:
    first, second, third = masters(10, 70, 30)
    model = {"a": first.bfloat16(), "b": second.bfloat16(), "c": third.bfloat16()}
    folder = write(tmp_path / "c", model, bucket(second, third, first))
    with Checkpoint(folder) as checkpoint:
        view = open_view(checkpoint)
        assert view.layout_problem is None
        assert moments(view, "b") == list(range(70))
        assert moments(view, "a") == list(range(192, 202))


@pytest.mark.parametrize("wrong", ["value", "tail", "extra", "int16", "no model"])
def test_one_master_that_fits_no_weight_spoils_the_proof(wrong: str, tmp_path: Path) -> None:
    first, second = masters(40, 100)
    model = {"a": first.bfloat16(), "b": second.bfloat16()}
    param = bucket(second, first)
    if wrong == "value":
        param[99] += 1.0
    elif wrong == "tail":
        param = param[:-1]
    elif wrong == "extra":
        param = bucket(second, first, torch.ones(5))
    elif wrong == "int16":
        param = param.to(torch.int16)
    else:
        model = {}
    folder = write(tmp_path / "c", model, param)
    with Checkpoint(folder) as checkpoint:
        view = open_view(checkpoint)
        assert view.layout_problem
        assert f"{STEM}bucket_idx_0.exp_avg" in view.tensors
    assert diff_checkpoints(folder, folder).verdict == EQUAL
    report = export_checkpoint(folder, tmp_path / "out")
    assert report.format == "buckets"


def test_weights_that_are_no_parameters_do_not_matter(tmp_path: Path) -> None:
    first, frozen = masters(40, 100)
    folder = write(tmp_path / "c", {"a": first.bfloat16(), "f": frozen.bfloat16()}, bucket(first))
    with Checkpoint(folder) as checkpoint:
        view = open_view(checkpoint)
        assert view.layout_problem is None
        assert "optimizer.state.param.f" not in view.tensors


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.int64, torch.uint8, torch.float16, torch.float8_e4m3fn, torch.complex64],
)
def test_any_dtype_and_stride_compares(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.arange(24).reshape(4, 6).to(dtype)
    other = values.clone()
    other.view(torch.uint8)[-1, -1] ^= 1
    transposed = values.t().contiguous().t()
    assert not transposed.is_contiguous()
    empty, scalar = torch.empty((0, 3), dtype=dtype), torch.tensor(1).to(dtype)
    rest = {"e": empty, "s": scalar}
    a = write_dcp(tmp_path / "a", {"w": values, **rest})
    b = write_dcp(tmp_path / "b", {"w": transposed, **rest})
    c = write_dcp(tmp_path / "c", {"w": other, **rest})
    for budget in (1 << 30, 1):
        assert diff_checkpoints(a, b, memory_bytes=budget).verdict == EQUAL
        report = diff_checkpoints(a, c, memory_bytes=budget)
        assert report.verdict == DIFFERENT
        assert [found.differing_elem for found in report.tensors] == [1]


def test_other_dtypes_are_different_but_their_values_compare(tmp_path: Path) -> None:
    values = torch.tensor([1.0, float("nan"), -2.5])
    a = write_dcp(tmp_path / "a", {"w": values})
    b = write_dcp(tmp_path / "b", {"w": values.bfloat16()})
    c = write_dcp(tmp_path / "c", {"w": torch.tensor([1.0, float("nan"), -2.0])})
    found = diff_checkpoints(a, b)
    assert found.verdict == DIFFERENT
    assert found.tensors[0].values_equal
    far = diff_checkpoints(a, c).tensors[0]
    assert (far.differing_elem, far.max_abs_diff) == (1, 0.5)
    zero = write_dcp(tmp_path / "z", {"w": torch.tensor([0.0])})
    minus = write_dcp(tmp_path / "m", {"w": torch.tensor([-0.0])})
    assert diff_checkpoints(zero, minus).verdict == DIFFERENT  # bits, not values


def test_inspect_shows_the_recorded_parallel_layout(tmp_path: Path) -> None:
    arguments = Namespace(world_size=16, tensor_model_parallel_size=4, seed=1)
    common = {"iteration": 7, "args": arguments}
    report = inspect_checkpoint(write_dcp(tmp_path / "c", {"w": torch.ones(2)}, common))
    assert report.layout["tensor_model_parallel_size"] == 4
    assert report.layout["world_size"] == 16
    assert "seed" not in report.layout


def test_an_export_holds_no_pipes_and_links(tmp_path: Path) -> None:
    from vime_optim.tools.importer import import_checkpoint

    source = write_dcp(tmp_path / "c", {"w": torch.ones(2)})
    for name in ("common.pt", "state-00001-of-00001.safetensors", "state.safetensors.index.json"):
        out = tmp_path / f"out-{name}"
        export_checkpoint(source, out, model=True)
        (out / name).unlink()
        os.mkfifo(out / name)
        with pytest.raises(CheckpointError):
            import_checkpoint(out, tmp_path / "no")


@given(
    shape=st.lists(st.integers(0, 7), max_size=4).map(tuple),
    limit=st.integers(1, 50),
)
@settings(deadline=None)
def test_tiles_hold_every_element_once_in_flat_order(shape: tuple[int, ...], limit: int) -> None:
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    seen = []
    for box in tiles(shape, limit):
        part = box.part_of(numbers)
        assert part.size <= limit
        seen += part.reshape(-1).tolist()
    assert seen == list(range(numbers.size))

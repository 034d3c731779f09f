"""What repair and import write is loaded by stock megatron-core itself, optimizer and all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cases import Case
from tests.conftest import LauncherPool
from tests.tools.conftest import Unpack
from vime_optim.tools.diff import EQUAL, diff_checkpoints
from vime_optim.tools.export import export_checkpoint
from vime_optim.tools.importer import import_checkpoint
from vime_optim.tools.repair import repair_checkpoint
from vime_optim.verify.launch import RankFailure

TARGET = "tests.tools.fixture_job:"


def load_and_save_again(
    launchers: LauncherPool, case: str, checkpoint: Path, scratch: Path
) -> list[dict[str, Any]]:
    """Stock megatron-core loads a checkpoint into a fresh job and saves it at once as `saved`."""
    parsed = Case.parse(case)
    assert not parsed.install
    payload = {
        "case": parsed.to_dict(),
        "directory": str(checkpoint.parent),
        "saved": str(scratch / "saved"),
        "step": 3,
    }
    (scratch / "saved").mkdir(parents=True)
    return launchers.get(parsed.megatron).run(
        TARGET + "load_and_save",
        world_size=parsed.load_layout.world_size,
        payload=payload,
        out=scratch / "logs",
    )


def place(folder: Path) -> Path:
    return folder / "iter_0000003"


HYBRID = "hybrid,pao,f=1,stock"
MATRIX = pytest.mark.matrix


@pytest.mark.parametrize(
    "release",
    ["0.16.1", pytest.param("0.18.2", marks=MATRIX), pytest.param("0.19.2", marks=MATRIX)],
)
def test_stock_loads_a_repaired_f2_checkpoint(
    release: str, launchers: LauncherPool, stock: Unpack, tmp_path: Path
) -> None:
    source, case = stock("f2_0.15.3"), f"{release},{HYBRID},dp_reshardable,dp=3"
    with pytest.raises(RankFailure, match=r"Cannot merge two lists|Duplicate non-dict"):
        load_and_save_again(launchers, case, source, tmp_path / "broken")
    repair_checkpoint(source, place(tmp_path / "mended"))
    load_and_save_again(launchers, case, place(tmp_path / "mended"), tmp_path / "loaded")
    report = diff_checkpoints(source, place(tmp_path / "loaded" / "saved"))
    assert report.tensors == report.only_in_a == report.only_in_b == []
    assert report.compared == 44


@pytest.mark.parametrize("release", ["0.15.3", "0.16.1"])
def test_stock_loads_a_repaired_f9_checkpoint(
    release: str, launchers: LauncherPool, stock: Unpack, tmp_path: Path
) -> None:
    source = stock("f9_0.15.3")
    case = f"{release},{HYBRID},fully_reshardable,1bucket,dp=2"
    with pytest.raises(RankFailure, match=r"Weights only load failed|Unsupported global"):
        load_and_save_again(launchers, case, source, tmp_path / "broken")
    repair_checkpoint(source, place(tmp_path / "mended"))
    load_and_save_again(launchers, case, place(tmp_path / "mended"), tmp_path / "loaded")
    report = diff_checkpoints(source, place(tmp_path / "loaded" / "saved"))
    assert report.tensors == report.only_in_a == report.only_in_b == []


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("f2_0.15.3", f"0.16.1,{HYBRID},fully_reshardable,1bucket,dp=2"),
        ("f3_0.16.1", f"0.19.2,{HYBRID},fully_reshardable,1bucket,dp=3"),
        ("tp2_dp_0.16.1", "0.16.1,fused,nopao,fully_reshardable,1bucket,dp=2,tp=2->1,stock"),
        ("full_0.19.2", "0.15.3,fused,nopao,fully_reshardable,1bucket,dp=2,stock"),
        pytest.param(
            "dp_0.15.3",
            "0.19.2,fused,nopao,fully_reshardable,1bucket,dp=2,tp=1->2,stock",
            marks=MATRIX,
        ),
        ("moe_dp_0.19.2", "0.19.2,fused,nopao,moe,fully_reshardable,1bucket,dp=2,ep=2,stock"),
    ],
)
def test_stock_loads_an_imported_checkpoint(
    name: str, case: str, launchers: LauncherPool, stock: Unpack, tmp_path: Path
) -> None:
    """Across formats, releases and parallel layouts, through safetensors, bit by bit."""
    export_checkpoint(stock(name), tmp_path / "export", model=True)
    import_checkpoint(tmp_path / "export", place(tmp_path / "made"))
    assert diff_checkpoints(stock(name), place(tmp_path / "made")).verdict == EQUAL
    load_and_save_again(launchers, case, place(tmp_path / "made"), tmp_path / "loaded")
    report = diff_checkpoints(stock(name), place(tmp_path / "loaded" / "saved"))
    assert report.tensors == report.only_in_a == report.only_in_b == []
    assert report.compared == (48 if "moe" in name else 44)

"""inspect, diff, repair, export and import on checkpoints that stock megatron-core wrote."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.tools.broken import write_checkpoint
from tests.tools.conftest import NAMES, Unpack
from vime_optim.cli import main
from vime_optim.errors import CheckpointError
from vime_optim.files.geometry import whole
from vime_optim.files.safe_load import load_common, save_common
from vime_optim.tools import load_safetensors
from vime_optim.tools.bits import same_bits
from vime_optim.tools.common import optimizer_children
from vime_optim.tools.diff import CANNOT_SAY, DIFFERENT, EQUAL, diff_checkpoints
from vime_optim.tools.export import export_checkpoint
from vime_optim.tools.importer import import_checkpoint
from vime_optim.tools.inspect import inspect_checkpoint
from vime_optim.tools.logical import open_view
from vime_optim.tools.reader import Checkpoint
from vime_optim.tools.repair import repair_checkpoint

HEALTHY = [name for name in NAMES if not name.startswith(("f2", "f3", "f9"))]


def finding_ids(path: Path) -> list[str]:
    return [finding.id for finding in inspect_checkpoint(path).findings]


def listing(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    return {
        path.name: (path.stat().st_mtime_ns, path.stat().st_mode, path.read_bytes())
        for path in folder.iterdir()
    }


def test_the_fixtures_are_there() -> None:
    assert len(HEALTHY) >= 9
    assert {"f2_0.15.3", "f3_0.16.1", "f9_0.15.3"} <= set(NAMES)


@pytest.mark.parametrize("name", HEALTHY)
def test_inspect_finds_a_stock_checkpoint_whole(name: str, stock: Unpack) -> None:
    report = inspect_checkpoint(stock(name))
    assert report.findings == []
    assert report.step == 3
    assert report.optimizer_steps == [3]
    assert report.sharding == ("dp_reshardable" if "dp_" in name else "fully_reshardable")
    release = name.rpartition("_")[2] if "dp3" not in name else "0.16.1"
    assert release.rpartition(".")[0] in report.written_by
    assert report.optimizer_backend == "FusedAdam (Transformer Engine or Apex)"
    assert report.model.count > 0
    assert report.optimizer.dtypes == {"float32": report.optimizer.count}


def test_inspect_names_the_known_faults(stock: Unpack) -> None:
    f2 = inspect_checkpoint(stock("f2_0.15.3"))
    assert [finding.id for finding in f2.errors] == ["F2"]
    assert finding_ids(stock("f2_0.15.3")) == ["F2", "F9", "F3"]
    assert finding_ids(stock("f3_0.16.1")) == ["F9", "F3"]
    f9 = inspect_checkpoint(stock("f9_0.15.3"))
    assert [finding.id for finding in f9.errors] == ["F9"]
    assert "repair" in f9.errors[0].todo


def test_inspect_finds_missing_and_short_files(copy_of: Unpack) -> None:
    folder = copy_of("f2_0.15.3")
    (folder / "__2_0.distcp").unlink()
    with (folder / "__1_0.distcp").open("r+b") as file:
        file.truncate(1000)
    (folder / "metadata.json").unlink()
    assert {"missing-file", "truncated-file", "no-config"} <= set(finding_ids(folder))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("full_0.16.1", "full_0.19.2"),
        ("dp_0.16.1", "dp_0.19.2"),
        ("dp_0.16.1", "full_0.16.1"),
        ("dp_0.19.2", "full_0.19.2"),
        ("dp_0.15.3", "full_0.15.3"),
        ("tp2_dp_0.16.1", "tp2_full_0.16.1"),
        ("moe_dp_0.19.2", "moe_full_0.19.2"),
    ],
)
def test_diff_across_releases_and_formats(a: str, b: str, stock: Unpack) -> None:
    """The same training saved in another way has the same bits by name."""
    report = diff_checkpoints(stock(a), stock(b), memory_bytes=1 << 20)
    assert report.verdict == EQUAL, report
    assert report.compared == (48 if "moe" in a else 44)


def test_diff_names_what_differs(stock: Unpack) -> None:
    report = diff_checkpoints(stock("full_0.16.1"), stock("f9_0.15.3"))
    assert report.verdict == DIFFERENT
    assert any(found.max_abs_diff for found in report.tensors)
    names = {scalar["name"] for scalar in report.scalars}
    assert "optimizer.0.param_groups.0.default_config" in names


def test_diff_sees_one_flipped_bit(copy_of: Unpack, stock: Unpack) -> None:
    folder = copy_of("full_0.16.1")
    key = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight"
    with Checkpoint(folder) as checkpoint:
        entry = checkpoint.tensors[key]
        chunk = entry.chunks[-1]
        assert chunk.location is not None
        at = checkpoint.layout(entry, chunk).start_bytes + 4 * (chunk.numel - 1)
        file = folder / chunk.location.file
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    report = diff_checkpoints(stock("full_0.16.1"), folder)
    assert [(found.name, found.differing_elem) for found in report.tensors] == [(key, 1)]
    assert report.verdict == DIFFERENT


def change_weight(folder: Path) -> None:
    """Another value in one weight of the model, its master left as it is."""
    with Checkpoint(folder) as checkpoint:
        entry = checkpoint.tensors["decoder.final_layernorm.weight"]
        place = entry.chunks[0].location
        assert place is not None
        at = checkpoint.layout(entry, entry.chunks[0]).start_bytes
    data = bytearray((folder / place.file).read_bytes())
    data[at + 1] ^= 0x40
    (folder / place.file).write_bytes(data)


def test_diff_cannot_say_where_masters_fit_no_weight(stock: Unpack, tmp_path: Path) -> None:
    """Then the buckets have no known layout, and nothing is guessed."""
    flat = Path(shutil.copytree(stock("dp_0.16.1"), tmp_path / "dp"))
    full = Path(shutil.copytree(stock("full_0.16.1"), tmp_path / "full"))
    change_weight(flat)
    change_weight(full)
    with Checkpoint(flat) as checkpoint:
        problem = open_view(checkpoint).layout_problem
        assert problem is not None
        assert "match no weight" in problem
    report = diff_checkpoints(flat, full)
    assert report.verdict == CANNOT_SAY
    assert report.compared == 11  # the model
    assert main(["diff", str(flat), str(full)]) == 2
    assert diff_checkpoints(flat, flat).verdict == EQUAL  # bucket against bucket needs no layout
    assert diff_checkpoints(flat, stock("full_0.16.1")).verdict == DIFFERENT


@pytest.mark.parametrize("name", ["f2_0.15.3", "f9_0.15.3", "f3_0.16.1"])
def test_repair_mends_and_changes_no_tensor(name: str, stock: Unpack, tmp_path: Path) -> None:
    source, target = stock(name), tmp_path / "new"
    before = listing(source)
    planned = repair_checkpoint(source, target, dry_run=True)
    assert not target.exists()
    plan = repair_checkpoint(source, target)
    assert plan.changes == planned.changes != []
    assert {file for file, how in plan.files.items() if how == "new"} == {
        file for file, how in planned.files.items() if how == "new"
    }
    assert listing(source) == before
    assert all(f.severity != "error" for f in inspect_checkpoint(target).findings)
    assert "F9" not in finding_ids(target)
    assert diff_checkpoints(source, target).verdict == EQUAL
    shards = [file for file in plan.files if file.endswith(".distcp") and "mended" not in file]
    assert shards
    assert all(os.path.samefile(source / file, target / file) for file in shards)
    torch.load(target / "common.pt", weights_only=True)  # as torch >= 2.6 does by default
    again = repair_checkpoint(target, tmp_path / "again")
    assert again.changes == []


def test_repair_rebuilds_metadata_json_and_steps(copy_of: Unpack, tmp_path: Path) -> None:
    folder = copy_of("full_0.15.3")
    expected = json.loads((folder / "metadata.json").read_text())
    (folder / "metadata.json").unlink()
    common = load_common(folder / "common.pt")
    groups = common["optimizer"]["optimizer"]["param_groups"]
    del groups[1]["step"]
    save_common(common, folder / "common.pt")
    assert set(finding_ids(folder)) == {"no-config", "no-step"}
    plan = repair_checkpoint(folder, tmp_path / "new", link=False)
    assert len(plan.changes) == 2
    assert json.loads((tmp_path / "new" / "metadata.json").read_text()) == expected
    mended = load_common(tmp_path / "new" / "common.pt")
    assert [g["step"] for g in mended["optimizer"]["optimizer"]["param_groups"]] == [3, 3]
    assert not os.path.samefile(folder / ".metadata", tmp_path / "new" / ".metadata")


def test_repair_refuses_to_guess(copy_of: Unpack, tmp_path: Path) -> None:
    folder = copy_of("full_0.15.3")
    common = load_common(folder / "common.pt")
    common["optimizer"]["optimizer"]["param_groups"][1]["step"] = 4
    save_common(common, folder / "common.pt")
    with pytest.raises(CheckpointError, match="without guessing"):
        repair_checkpoint(folder, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_repair_keeps_tensors_that_stand_in_the_common_state(
    copy_of: Unpack, tmp_path: Path
) -> None:
    folder = copy_of("f2_0.15.3")
    common = load_common(folder / "common.pt")
    (_, child), *_ = optimizer_children(common)
    buckets = next(iter(child["param_state"][0].values()))
    buckets[0][0]["exp_avg"] = torch.ones(3)
    save_common(common, folder / "common.pt")
    with pytest.raises(CheckpointError, match="not only steps"):
        repair_checkpoint(folder, tmp_path / "new")


@pytest.mark.parametrize("command", ["repair", "export", "import"])
def test_outputs_are_never_overwritten(command: str, stock: Unpack, tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("mine")
    source = stock("f9_0.15.3")
    if command == "import":
        export_checkpoint(source, tmp_path / "export")
        source = tmp_path / "export"
    assert main([command, str(source), "--out", str(tmp_path / "used")]) == 2
    assert main([command, str(source), "--out", str(source / "inside")]) == 2
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["file"]
    assert not (source / "inside").exists()


@pytest.mark.parametrize("name", NAMES)
def test_export_and_import_are_bit_exact(name: str, stock: Unpack, tmp_path: Path) -> None:
    source = stock(name)
    before = listing(source)
    report = export_checkpoint(source, tmp_path / "export", model=True, shard_bytes=4096)
    assert report.format == "fully_reshardable"
    assert report.shards > 1
    import_checkpoint(tmp_path / "export", tmp_path / "new", memory_bytes=1 << 16)
    assert diff_checkpoints(source, tmp_path / "new").verdict == EQUAL
    assert finding_ids(tmp_path / "new") == []
    assert inspect_checkpoint(tmp_path / "new").sharding == "fully_reshardable"
    assert listing(source) == before


def test_an_export_reads_as_safetensors(stock: Unpack, tmp_path: Path) -> None:
    source = stock("f2_0.15.3")
    export_checkpoint(source, tmp_path / "out")
    ours = load_safetensors(tmp_path / "out")
    theirs = load_file(tmp_path / "out" / "state-00001-of-00001.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert name.startswith("optimizer.state.")
        assert tensor.dtype == torch.float32
        assert same_bits(tensor, theirs[name])
    with Checkpoint(source) as checkpoint:
        view = open_view(checkpoint)
        for name, tensor in ours.items():
            bits = view.read(view.tensors[name], whole(tuple(tensor.shape)))
            assert tensor.view(torch.int32).numpy().tobytes() == bits.tobytes()
    assert len(load_safetensors(tmp_path / "out", names=[name])) == 1


def test_export_chooses_and_converts(stock: Unpack, tmp_path: Path) -> None:
    source = stock("full_0.16.1")
    export_checkpoint(
        source,
        tmp_path / "out",
        include=["optimizer.state.exp_avg*"],
        exclude=["*norm*"],
        dtype=torch.bfloat16,
    )
    chosen = load_safetensors(tmp_path / "out")
    assert chosen
    assert all("exp_avg" in name and "norm" not in name for name in chosen)
    export_checkpoint(source, tmp_path / "exact")
    exact = load_safetensors(tmp_path / "exact", names=list(chosen))
    for name, tensor in chosen.items():
        assert torch.equal(tensor, exact[name].to(torch.bfloat16))
    with pytest.raises(CheckpointError, match="Nothing is left"):
        export_checkpoint(source, tmp_path / "none", include=["nothing"])


def test_an_interrupted_export_goes_on(
    stock: Unpack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vime_optim.tools import export

    source, out = stock("full_0.16.1"), tmp_path / "out"
    whole = export_checkpoint(source, tmp_path / "whole", shard_bytes=4096)
    write_shard, written = export._write_shard, []

    def fail_at_third(*args: object) -> None:
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        write_shard(*args)  # type: ignore[arg-type]
        written.append(args[1])

    monkeypatch.setattr(export, "_write_shard", fail_at_third)
    with pytest.raises(OSError, match="No space"):
        export_checkpoint(source, out, shard_bytes=4096)
    assert main(["import", str(out), "--out", str(tmp_path / "no")]) == 2  # unfinished
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="something else"):
        export_checkpoint(source, out, shard_bytes=8192)
    report = export_checkpoint(source, out, shard_bytes=4096)
    assert (report.resumed, report.shards) == (2, whole.shards)
    for path in sorted((tmp_path / "whole").glob("*.safetensors")):
        assert path.read_bytes() == (out / path.name).read_bytes()
    assert not (out / "export-plan.json").exists()


def test_import_from_another_trainer(stock: Unpack, tmp_path: Path) -> None:
    """Safetensors and an index are enough: no file of Megatron's is needed."""
    export_checkpoint(stock("full_0.16.1"), tmp_path / "out", model=True)
    (tmp_path / "out" / "common.pt").unlink()
    (tmp_path / "out" / "objects.pt").unlink()
    import_checkpoint(tmp_path / "out", tmp_path / "new")
    report = diff_checkpoints(stock("full_0.16.1"), tmp_path / "new")
    assert report.tensors == report.only_in_a == report.only_in_b == []
    assert inspect_checkpoint(tmp_path / "new").optimizer_steps == [3]


def test_buckets_without_a_layout_go_and_come_back(copy_of: Unpack, tmp_path: Path) -> None:
    """No weights to prove the layout by: the buckets cross as they are."""
    from vime_optim.tools import logical

    source = copy_of("dp_0.16.1")
    original = logical.derive_layout
    logical.derive_layout = lambda *_: "no weights"  # type: ignore[assignment]
    try:
        report = export_checkpoint(source, tmp_path / "out", model=True)
    finally:
        logical.derive_layout = original
    assert report.format == "buckets"
    assert report.notes
    import_checkpoint(tmp_path / "out", tmp_path / "new")
    assert inspect_checkpoint(tmp_path / "new").sharding == "dp_reshardable"
    assert diff_checkpoints(source, tmp_path / "new").verdict == EQUAL


def test_commands_print_within_80_columns(
    stock: Unpack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    f2, f9 = str(stock("f2_0.15.3")), str(stock("f9_0.15.3"))
    assert main(["inspect", f2, "--tree"]) == 1
    assert main(["inspect", str(stock("full_0.19.2"))]) == 0
    assert main(["diff", f2, f9]) == 1
    assert main(["diff", f2, f2]) == 0
    assert main(["repair", f2, "--out", str(tmp_path / "a")]) == 0
    assert main(["export", f2, "--out", str(tmp_path / "b")]) == 0
    assert main(["import", str(tmp_path / "b"), "--out", str(tmp_path / "c")]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    # A longer line is one name, whole, behind its label.
    assert all(len(line) <= 80 or len(line.split()) <= 4 for line in out.splitlines())


def test_commands_print_json(
    stock: Unpack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    f2 = str(stock("f2_0.15.3"))
    for arguments, key in (
        (["inspect", f2], "findings"),
        (["diff", f2, f2], "verdict"),
        (["repair", f2, "--out", str(tmp_path / "a")], "changes"),
        (["export", f2, "--out", str(tmp_path / "b")], "tensors"),
        (["import", str(tmp_path / "b"), "--out", str(tmp_path / "c")], "tensors"),
        (["inspect", str(tmp_path / "missing")], "error"),
    ):
        main([*arguments, "--json"])
        assert key in json.loads(capsys.readouterr().out)


def test_inspect_counts_the_ranks_of_our_files_too(tmp_path: Path) -> None:
    """Stock names files `__<rank>_<n>`, we `__<rank>_<random>_<n>`."""
    folder = write_checkpoint(tmp_path / "c", file="__3_0a1b2c3d_1.distcp")
    (folder / "__0_0.distcp").rename(folder / "__3_0a1b2c3d_1.distcp")
    (folder / "__3_0a1b2c3d_0.distcp").touch()
    (folder / "__4_0.distcp").touch()
    report = inspect_checkpoint(folder)
    assert report.findings == []
    assert report.layout["ranks_that_wrote"] == 2

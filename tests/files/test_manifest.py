"""Manifests: every flipped bit, cut, swapped or foreign file is named."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from tests.tools.conftest import copy_of, stock  # noqa: F401  (fixtures)
from vime_optim import settings
from vime_optim.cli import main
from vime_optim.commit.load_check import look
from vime_optim.errors import CheckpointError
from vime_optim.files import fastfile, manifest
from vime_optim.files.dcp_metadata import dump_metadata, parse_metadata
from vime_optim.files.manifest import MANIFEST_NAME, Manifest, verify_directory
from vime_optim.tools.repair import repair_checkpoint

CHUNK_BYTES = 4096


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastfile, "CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(manifest, "CHUNK_BYTES", CHUNK_BYTES)


def make(directory: Path, seed: int = 0) -> Path:
    """A directory with two .distcp files, a common.pt and a manifest."""
    directory.mkdir()
    generator = torch.Generator().manual_seed(seed)
    made = Manifest(chunk_bytes=CHUNK_BYTES)
    places: dict[MetadataIndex, _StorageInfo] = {}
    for number in range(2):
        name = f"__0_{number}.distcp"
        tensors = [torch.rand(n, generator=generator) for n in (1000, 5, 3000)]
        extents, record = fastfile.write_file(directory / name, name, list(tensors))
        for i, extent in enumerate(extents):
            index = MetadataIndex(f"optimizer.{number}.{i}", (0,))
            places[index] = _StorageInfo(name, extent.offset, extent.length)
        made.add(record)
    (directory / ".metadata").write_bytes(pickle.dumps(Metadata({}, None, places)))
    made.add(fastfile.digest_file(directory / ".metadata"))
    torch.save({"iteration": seed}, directory / "common.pt")
    made.add(fastfile.digest_file(directory / "common.pt"))
    made.write(directory)
    return directory


@pytest.fixture
def checkpoint(tmp_path: Path, small_chunks: None) -> Path:
    return make(tmp_path / "iter_0000001")


def test_an_untouched_directory_is_fine(checkpoint: Path) -> None:
    outcome = verify_directory(checkpoint)
    assert outcome.ok
    assert outcome.files == 4
    assert outcome.uncovered == ()
    assert outcome.bytes_read == sum(
        p.stat().st_size for p in checkpoint.iterdir() if p.name != MANIFEST_NAME
    )


def test_without_a_manifest_nothing_is_claimed(checkpoint: Path) -> None:
    (checkpoint / MANIFEST_NAME).unlink()
    outcome = verify_directory(checkpoint)
    assert not outcome.has_manifest
    assert "common.pt" in outcome.uncovered


def test_every_flipped_bit_is_named(checkpoint: Path) -> None:
    draw = random.Random(1)
    files = sorted(p for p in checkpoint.iterdir() if p.name != MANIFEST_NAME)
    for _ in range(300):
        path = draw.choice(files)
        raw = bytearray(path.read_bytes())
        position = draw.randrange(len(raw))
        raw[position] ^= 1 << draw.randrange(8)
        original = path.read_bytes()
        path.write_bytes(bytes(raw))
        problems = [p for p in verify_directory(checkpoint).problems if p.end]
        path.write_bytes(original)
        assert [p.file for p in problems] == [path.name]
        assert problems[0].start <= position < problems[0].end <= problems[0].start + CHUNK_BYTES


def test_a_problem_names_the_keys_in_its_range(checkpoint: Path) -> None:
    path = checkpoint / "__0_1.distcp"
    places = pickle.loads((checkpoint / ".metadata").read_bytes()).storage_data  # made above
    last = places[MetadataIndex("optimizer.1.2", (0,))]
    raw = bytearray(path.read_bytes())
    raw[last.offset + last.length - 1] ^= 4
    path.write_bytes(bytes(raw))
    [problem] = verify_directory(checkpoint).problems
    assert problem.keys == ("optimizer.1.2 at [0]",)
    assert "optimizer.1.2" in str(problem)


def test_every_cut_is_named(checkpoint: Path) -> None:
    draw = random.Random(2)
    for _ in range(60):
        path = draw.choice(sorted(checkpoint.glob("*.distcp")))
        original = path.read_bytes()
        path.write_bytes(original[: draw.randrange(len(original))])
        for deep in (True, False):
            outcome = verify_directory(checkpoint, deep=deep)
            assert path.name in {p.file for p in outcome.problems}
        path.write_bytes(original)


def test_swapped_files_are_named_without_reading_them(checkpoint: Path) -> None:
    first, second = sorted(checkpoint.glob("*.distcp"))
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)
    outcome = verify_directory(checkpoint, deep=False)
    assert {p.file for p in outcome.problems} == {first.name, second.name}


def test_a_file_of_another_step_is_named_without_reading_it(
    checkpoint: Path, tmp_path: Path
) -> None:
    other = make(tmp_path / "iter_0000002", seed=2)
    shutil.copy(other / "__0_0.distcp", checkpoint / "__0_0.distcp")
    [problem] = verify_directory(checkpoint, deep=False).problems
    assert problem.file == "__0_0.distcp"
    assert "another save" in problem.what


def test_a_missing_file_is_named(checkpoint: Path) -> None:
    (checkpoint / "__0_1.distcp").unlink()
    [problem] = verify_directory(checkpoint).problems
    assert problem.file == "__0_1.distcp"
    assert problem.what == "the file is missing"


def test_a_damaged_manifest_is_refused(checkpoint: Path) -> None:
    path = checkpoint / MANIFEST_NAME
    draw = random.Random(3)
    original = path.read_bytes()
    for _ in range(100):
        raw = bytearray(original)
        raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
        path.write_bytes(bytes(raw))
        with pytest.raises(CheckpointError, match="manifest is damaged"):
            verify_directory(checkpoint)
    path.write_bytes(original[:-10])
    with pytest.raises(CheckpointError, match="manifest is damaged"):
        verify_directory(checkpoint)


def test_a_newer_manifest_is_refused(checkpoint: Path) -> None:
    body = json.loads((checkpoint / MANIFEST_NAME).read_text())
    body["version"] = 99
    body.pop("check")
    body["check"] = manifest._check_of(body)
    (checkpoint / MANIFEST_NAME).write_text(json.dumps(body))
    with pytest.raises(CheckpointError, match="newer than this vime_optim"):
        verify_directory(checkpoint)


def test_amending_adds_a_file(checkpoint: Path) -> None:
    (checkpoint / "metadata.json").write_text("{}")
    assert verify_directory(checkpoint).uncovered == ("metadata.json",)
    manifest.amend(checkpoint, "metadata.json", "not there")
    outcome = verify_directory(checkpoint)
    assert outcome.ok
    assert outcome.uncovered == ()


def signed(folder: Path) -> Path:
    """A manifest of whatever is there, as a save leaves one."""
    index = parse_metadata((folder / ".metadata").read_bytes())
    marked = dump_metadata(index, {}, {manifest.MANIFEST_MARK: True})
    (folder / ".metadata").write_bytes(marked)
    made = manifest.Manifest()
    for path in sorted(folder.iterdir()):
        made.add(fastfile.digest_file(path))
    made.write(folder)
    return folder


@pytest.mark.parametrize("name", ["f9_0.15.3", "f2_0.15.3", "full_0.19.2"])
def test_what_repair_writes_is_accepted_by_a_load(
    name: str,
    copy_of: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    source = signed(copy_of(name))
    plan = repair_checkpoint(source, tmp_path / "mended")
    outcome = verify_directory(tmp_path / "mended")
    assert outcome.ok, outcome.problems
    assert outcome.uncovered == ()
    assert outcome.files == len(plan.files) - 1  # all but itself
    assert look(str(tmp_path / "mended"))[0] is None


def test_repair_refuses_a_file_of_another_save(copy_of: Any, tmp_path: Path) -> None:  # noqa: F811
    source = signed(copy_of("full_0.19.2"))
    path = max(source.glob("*.distcp"), key=lambda path: path.stat().st_size)
    with path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match="not the one that was saved"):
        repair_checkpoint(source, tmp_path / "mended")
    assert not (tmp_path / "mended").exists()


def test_a_lost_manifest_is_an_error_and_its_copy_none(
    copy_of: Any,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = signed(copy_of("full_0.19.2"))
    (source / MANIFEST_NAME).unlink()
    assert "vime_optim_manifest.json is gone" in str(look(str(source))[0])
    repair_checkpoint(source, tmp_path / "mended")
    assert look(str(tmp_path / "mended"))[0] is None
    monkeypatch.setattr(settings, "_current", settings.Settings(verify="all"))
    assert "asks for a check of every byte" in str(look(str(tmp_path / "mended"))[0])


def test_the_ranks_share_the_reading(copy_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Every chunk is read by one rank alone, and what is wrong is found by one of them."""
    source = signed(copy_of("full_0.19.2"))
    path = max(source.glob("*.distcp"), key=lambda path: path.stat().st_size)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(bytes(raw))
    found = manifest.read_manifest(source)
    assert found is not None
    read: list[Any] = []
    digest = manifest.digest_of
    monkeypatch.setattr(manifest, "digest_of", lambda *a: (read.append(a), digest(*a))[1])
    records = list(found.records.values())
    problems = [manifest.verify_files(source, records, found.chunk_bytes, n, 3) for n in range(3)]
    assert [p.file for part in problems for p in part] == [path.name]
    assert len(read) == len(set(read)) == sum(len(r.chunk_digests) // 8 for r in records)


def test_check_reads_a_directory(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(checkpoint)]) == 0
    path = checkpoint / "__0_1.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["check", "--quick", str(checkpoint)]) == 1
    assert "__0_1.distcp" in capsys.readouterr().out
    (checkpoint.parent / "latest_checkpointed_iteration.txt").write_text("1")
    assert main(["check", "--quick", str(checkpoint.parent)]) == 1
    (checkpoint / MANIFEST_NAME).unlink()
    assert main(["check", str(checkpoint)]) == 2
    assert main(["check", str(checkpoint / "nothing")]) == 2
    assert "There is nothing at this path" in capsys.readouterr().err

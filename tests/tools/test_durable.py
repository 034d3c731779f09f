"""What is written reaches the disk before it gets its name, and a write that fails leaves nothing.

The order of writes, syncs and renames is recorded; then each of these calls fails in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools.durable import recorded
from tests.tools.synthetic import write_dcp
from vime_optim.commit import sessions
from vime_optim.commit.sessions import SaveSession
from vime_optim.errors import CheckpointError
from vime_optim.files import fastfile
from vime_optim.files.manifest import MANIFEST_NAME, Manifest, read_manifest
from vime_optim.tools import output
from vime_optim.tools.export import export_checkpoint
from vime_optim.tools.importer import import_checkpoint
from vime_optim.tools.repair import repair_checkpoint

Unpack = Callable[[str], Path]


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below a folder: its bytes and when it was written."""
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_a_data_file_is_synced_after_its_last_byte(tmp_path: Path) -> None:
    with recorded() as calls:
        fastfile.write_file(tmp_path / "x", "x", [torch.rand(100), torch.rand(5)])
    kinds = [kind for kind, _ in calls.events]
    assert kinds.index("sync") == len(kinds) - 1
    assert kinds.count("sync") == 1
    assert kinds.count("write") > 1
    assert {path for _, path in calls.events} == {str(tmp_path / "x")}


def a_manifest(folder: Path, seed: int) -> Manifest:
    _, record = fastfile.write_file(folder / f"data{seed}", f"data{seed}", [torch.full((9,), seed)])
    manifest = Manifest()
    manifest.add(record)
    return manifest


def test_a_manifest_is_whole_before_it_has_its_name(tmp_path: Path) -> None:
    manifest = a_manifest(tmp_path, 1)
    with recorded() as calls:
        manifest.write(tmp_path)
    (part, path), (rename, target), (sync, folder) = [e for e in calls.events if e[0] != "write"]
    assert (part, rename, sync) == ("sync", "rename", "sync")
    assert Path(path).parent == tmp_path
    assert Path(path).name != MANIFEST_NAME
    assert (target, folder) == (str(tmp_path / MANIFEST_NAME), str(tmp_path))


def test_an_old_manifest_survives_a_write_that_fails(tmp_path: Path) -> None:
    a_manifest(tmp_path, 1).write(tmp_path)
    before = (tmp_path / MANIFEST_NAME).read_bytes()
    newer = a_manifest(tmp_path, 2)
    for number in range(2):  # its sync, and the rename
        with recorded(fail_at=number) as calls, pytest.raises(OSError, match="No space"):
            newer.write(tmp_path)
        assert calls.failed
        assert (tmp_path / MANIFEST_NAME).read_bytes() == before
    newer.write(tmp_path)
    found = read_manifest(tmp_path)
    assert found is not None
    assert list(found.records) == ["data2"]


def test_a_directory_that_cannot_be_synced_is_no_failure(tmp_path: Path) -> None:
    """Some network file systems cannot; the files themselves are on the disk."""
    manifest = a_manifest(tmp_path, 1)
    with recorded(fail_at=2) as calls:
        manifest.write(tmp_path)
    assert calls.events[2] == ("sync", str(tmp_path))


def test_the_mark_of_a_whole_checkpoint_is_synced_with_its_directory(tmp_path: Path) -> None:
    a_manifest(tmp_path, 1).write(tmp_path)
    (tmp_path / "metadata.json").write_text("{}")
    session = SaveSession(str(tmp_path))
    with recorded() as calls:
        sessions.rank0_step(session, "metadata.json", lambda: None)
    assert session.error is None
    assert calls.events[-1] == ("sync", str(tmp_path))
    found = read_manifest(tmp_path)
    assert found is not None
    assert set(found.records) == {"data1", "metadata.json"}


def test_a_checkpoint_whose_manifest_cannot_be_written_is_not_declared_whole(
    tmp_path: Path,
) -> None:
    a_manifest(tmp_path, 1).write(tmp_path)
    (tmp_path / "metadata.json").write_text("{}")
    session = SaveSession(str(tmp_path))
    with recorded(fail_at=0):
        sessions.rank0_step(session, "metadata.json", lambda: None)
    assert session.error is not None
    assert not (tmp_path / "metadata.json").exists()


def test_nothing_follows_a_step_that_failed(tmp_path: Path) -> None:
    session = SaveSession(str(tmp_path))
    done: list[str] = []

    def fail() -> None:
        raise OSError("no")

    sessions.rank0_step(session, "common.pt", fail)
    sessions.rank0_step(session, "metadata.json", lambda: done.append("declared whole"))
    assert done == []
    assert "no" in str(session.error)


@pytest.fixture
def broken(copy_of: Unpack) -> Path:
    """A checkpoint that repair has something to do on: classes in common.pt, no metadata.json."""
    folder = copy_of("f9_0.15.3")
    (folder / "metadata.json").unlink()
    return folder


@pytest.mark.parametrize("link", [True, False])
def test_repair_syncs_every_file_before_the_name(link: bool, broken: Path, tmp_path: Path) -> None:
    before = contents(broken)
    target = tmp_path / "out" / "repaired"
    with recorded() as calls:
        plan = repair_checkpoint(broken, target, link=link)
    new = {name for name, how in plan.files.items() if how in ("new", "copy")}
    assert new >= {"metadata.json", "common.pt"}
    moves = [event for event in calls.events if event[0] != "write"]
    rename = moves.index(("rename", str(target)))
    synced = [Path(path) for _, path in moves[:rename]]
    folder = synced[-1]  # the directory itself, after its files
    assert {path.name for path in synced[:-1]} == new
    assert {path.parent for path in synced[:-1]} == {folder}
    assert folder.parent == target.parent
    assert folder != target
    assert synced[-2].name == "metadata.json"  # the mark of a whole checkpoint comes last
    assert moves[rename + 1 :] == [("sync", str(target.parent))]
    assert contents(broken) == before


def every_failure(act: Callable[[Path], Any], root: Path, source: Path) -> int:
    """Make each recorded call of `act` fail in turn; how many there were."""
    before = contents(source)
    for number in range(200):
        parent = root / f"turn{number}"
        target = parent / "out"
        error = None
        with recorded(fail_at=number) as calls:
            try:
                act(target)
            except CheckpointError as caught:
                error = caught
        assert contents(source) == before
        if error is None:
            assert target.is_dir()
            if not calls.failed:
                return number
            # A directory that cannot be synced is no failure: the new one, or the one around it.
            kind, path = calls.events[number]
            assert kind == "sync"
            assert Path(path) == parent or Path(path).parent == parent
            continue
        assert calls.failed
        assert "No space" in str(error)
        assert not target.exists(), calls.events[-1]
        assert not parent.exists() or not any(parent.iterdir()), "something was left behind"
    raise AssertionError("it never ends")


@pytest.mark.parametrize("link", [True, False])
def test_a_repair_that_fails_leaves_no_target_and_its_source(
    link: bool, broken: Path, tmp_path: Path
) -> None:
    count = every_failure(
        lambda target: repair_checkpoint(broken, target, link=link), tmp_path, broken
    )
    assert count >= 4


def test_an_import_that_fails_leaves_no_target_and_its_source(tmp_path: Path) -> None:
    checkpoint = write_dcp(tmp_path / "tiny", {"w": torch.rand(4), "v": torch.rand(2, 3)})
    export = tmp_path / "export"
    export_checkpoint(checkpoint, export, model=True)
    count = every_failure(lambda target: import_checkpoint(export, target), tmp_path, export)
    assert count >= 4


@pytest.mark.parametrize("how", ["reflink", "copy"])
def test_a_shared_file_is_synced(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that two files share, too: what says so is written by the sync."""
    monkeypatch.setattr(output, "_reflink", lambda source, target: how == "reflink")
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"data")
    with source.open("rb") as file, recorded() as calls:
        assert output.share_file(file.fileno(), source, target, link=False) == how
    assert calls.events[-1] == ("sync", str(target))
    assert target.read_bytes() == (b"data" if how == "copy" else b"")

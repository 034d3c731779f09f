"""Damaged, hostile and foreign directories: words and exit 2, no code run, no memory taken."""

from __future__ import annotations

import collections
import io
import json
import os
import pickle
import struct
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
)

from tests.memory import at_most, counted
from tests.tools.broken import saved, write_checkpoint
from tests.tools.conftest import Unpack
from vime_optim.cli import main
from vime_optim.errors import CheckpointError
from vime_optim.files.dcp_metadata import parse_metadata
from vime_optim.files.geometry import whole
from vime_optim.files.safe_load import load_common, save_common
from vime_optim.files.stand_ins import inert_class
from vime_optim.tools.inspect import inspect_checkpoint
from vime_optim.tools.reader import Checkpoint
from vime_optim.tools.safetensors_io import INDEX_NAME, open_tensors


class Bomb:
    """Unpickled the usual way, this creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


class Reaches:
    """Pickled as a global of another module."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, self.arguments


def commands_refuse(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Every command ends with 2 and words; returns what they said."""
    for arguments in (
        ["diff", str(folder), str(folder)],
        ["repair", str(folder), "--out", str(folder.parent / "r")],
        ["export", str(folder), "--out", str(folder.parent / "e"), "--model"],
        ["import", str(folder), "--out", str(folder.parent / "i")],
    ):
        assert main(arguments) == 2, arguments
    assert main(["inspect", str(folder)]) in (1, 2)
    output = capsys.readouterr()
    assert "Traceback" not in output.out + output.err
    assert "unexpectedly" not in output.err
    assert not (folder.parent / "r").exists()
    assert not (folder.parent / "i").exists()
    return output.out + output.err


def test_the_small_checkpoint_is_fine_where_nothing_is_wrong(tmp_path: Path) -> None:
    assert inspect_checkpoint(write_checkpoint(tmp_path / "c")).findings == []
    assert main(["diff", str(tmp_path / "c"), str(tmp_path / "c")]) == 0


@pytest.mark.parametrize("kind", [".metadata", "common.pt", "item", "object"])
def test_pickle_bombs_do_not_go_off(
    kind: str, copy_of: Unpack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sign, folder = tmp_path / "went-off", tmp_path / "c"
    bomb = Bomb(sign)
    if kind == ".metadata":
        write_checkpoint(folder)
        (folder / ".metadata").write_bytes(pickle.dumps(bomb))
    elif kind == "common.pt":
        write_checkpoint(folder)
        (folder / "common.pt").write_bytes(saved({"iteration": 1, "x": bomb}))
    elif kind == "item":
        write_checkpoint(folder, content=saved({"x": bomb}))
    else:
        folder = copy_of("full_0.16.1")
        with Checkpoint(folder) as checkpoint:
            key = next(key for key in checkpoint.objects if key.startswith("rng_state"))
            place = checkpoint.objects[key]
        assert place is not None
        data = bytearray((folder / place.file).read_bytes())
        bad = saved([bomb])
        assert len(bad) <= place.length_bytes
        raw = pickle.loads((folder / ".metadata").read_bytes())
        index = next(i for i in raw.storage_data if i.fqn == key)
        raw.storage_data[index].length = len(bad)
        data[place.offset_bytes : place.offset_bytes + len(bad)] = bad
        (folder / place.file).write_bytes(data)
        (folder / ".metadata").write_bytes(pickle.dumps(raw))
        assert main(["diff", str(folder), str(folder)]) == 2
        assert main(["export", str(folder), "--out", str(tmp_path / "e")]) == 2
        assert "posix.mkdir" in capsys.readouterr().err
    if kind in (".metadata", "common.pt"):
        assert "mkdir" in commands_refuse(folder, capsys)
    elif kind == "item":
        for arguments in (["diff", str(folder)], ["export", str(folder), "--model", "--out"]):
            assert main([*arguments, str(folder if "diff" in arguments else tmp_path / "e")]) == 2
        assert "mkdir" in capsys.readouterr().err
    assert not sign.exists()


@pytest.mark.parametrize(
    "call",
    [
        Reaches(torch.Tensor, 1 << 40),
        Reaches(bytearray, 1 << 40),
        Reaches(eval, "1"),
        Reaches(getattr, 1, "real"),
        Reaches(collections.deque, [1]),
        Reaches(torch.load, "/etc/passwd"),
        Reaches(torch.hub.load, "x", "y"),
    ],
)
def test_only_what_megatron_saves_is_named(call: Reaches) -> None:
    with pytest.raises(CheckpointError, match="names that no Megatron checkpoint needs"):
        load_common(saved({"x": call}))


def test_stand_ins_do_not_let_unknown_instances_through() -> None:
    before = set(torch.serialization.get_safe_globals())
    data = saved({"param_groups": [{"cls": collections.deque}], "iteration": 1})
    kept = load_common(data, keep_unknown_classes=True)
    assert kept["param_groups"][0]["cls"].dotted_name == "collections.deque"
    with pytest.raises(CheckpointError, match="nothing was run"):
        load_common(saved({"x": Reaches(collections.deque, [1])}), keep_unknown_classes=True)
    assert set(torch.serialization.get_safe_globals()) == before


def test_enums_of_megatron_pass_through_without_megatron() -> None:
    """A fork's enum in `args` is kept by name, and written again as that name."""
    kind = inert_class("megatron.core.odd.KindOf")(3)
    buffer = io.BytesIO()
    save_common({"args": Namespace(kind=kind)}, buffer)
    assert b"megatron.core.odd\nKindOf\n" in buffer.getvalue()
    with pytest.raises(CheckpointError, match="names that no Megatron"):
        load_common(buffer.getvalue())
    kept = load_common(buffer.getvalue(), keep_unknown_classes=True)
    assert repr(kept["args"].kind) == "<inert megatron.core.odd.KindOf(3,)>"
    assert kept == {"args": Namespace(kind=kind)}


def test_metadata_cannot_change_torch_itself() -> None:
    """BUILD on a class would set attributes of torch's class in this process."""
    before = dict(vars(ChunkStorageMetadata))
    hostile = (
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nChunkStorageMetadata\n"
        b"N}U\x01xK\x01s\x86b."
    )
    with pytest.raises(CheckpointError):
        parse_metadata(hostile)
    assert dict(vars(ChunkStorageMetadata)) == before


@pytest.mark.parametrize(
    "opcodes",
    [
        b"\x80\x02N" + b"r\xff\xff\xff\x7f" + b".",  # memo of two thousand million entries
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",  # bytearray of a tebibyte
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".",
        b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b".",
        b"\x80\x02" + b"(" * 100_000,
        b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    ],
)
def test_metadata_declares_what_it_likes(opcodes: bytes) -> None:
    with at_most(64 << 20), pytest.raises(CheckpointError):
        parse_metadata(opcodes)


@pytest.mark.parametrize(
    "name",
    ["../secret", "/etc/passwd", "..", ".", "", "a/b", "a\\b", "x\0y", "missing.distcp"],
)
def test_file_names_stay_in_the_directory(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "secret").write_bytes(saved(torch.arange(4.0)))
    folder = write_checkpoint(tmp_path / "c", file=name)
    assert "file" in commands_refuse(folder, capsys)


def test_links_are_not_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "secret").write_bytes(saved(torch.arange(4.0)))
    for name in ("__0_0.distcp", "common.pt", ".metadata"):
        folder = write_checkpoint(tmp_path / name / "c")
        target = tmp_path / f"secret-{name}"
        (folder / name).rename(target)
        (folder / name).symlink_to(target)
        commands_refuse(folder, capsys)


def test_pipes_and_folders_are_not_read(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c")
    (folder / "__0_0.distcp").unlink()
    os.mkfifo(folder / "__0_0.distcp")
    assert main(["diff", str(folder), str(folder)]) == 2
    (folder / "common.pt").unlink()
    (folder / "common.pt").mkdir()
    assert main(["inspect", str(folder)]) == 1


@pytest.mark.parametrize(
    ("wrong", "inspected"),
    [
        # inspect reads no data: what only the data contradicts, diff and export find.
        ({"shape": (5,)}, 0),
        ({"shape": (2, 2)}, 0),
        ({"content": b"PK\x05\x06" + b"\0" * 18}, 0),
        ({"content": saved([1, 2])}, 0),
        ({"content": saved(torch.arange(8.0))}, 0),
        # A finding: its place in the file, or the file, is too short for it.
        ({"shape": (1 << 60,)}, 1),
        ({"shape": (1 << 50, 1 << 50)}, 1),
        ({"length": 10}, 1),
        ({"content": b""}, 1),
        ({"offset": 7}, 1),
        ({"offset": 1 << 62}, 1),
        ({"length": 1 << 62}, 1),
        # Metadata that is refused.
        ({"offset": -1}, 2),
        ({"length": -5}, 2),
    ],
)
def test_absurd_sizes(
    wrong: dict[str, Any],
    inspected: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = write_checkpoint(tmp_path / "c", **wrong)
    with at_most(64 << 20):
        assert main(["diff", str(folder), str(folder)]) == 2
        assert main(["export", str(folder), "--model", "--out", str(tmp_path / "e")]) == 2
        assert main(["inspect", str(folder)]) == inspected
    output = capsys.readouterr()
    assert "unexpectedly" not in output.err
    assert ("no faults found" in output.out) == (inspected == 0)


def test_chunks_with_gaps_and_overlaps(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c")
    raw = pickle.loads((folder / ".metadata").read_bytes())
    entry = raw.state_dict_metadata["weight"]
    for chunks in ([((0,), (2,))], [((0,), (3,)), ((2,), (2,))], [((1,), (3,)), ((1,), (1,))]):
        entry.chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in chunks]
        (folder / ".metadata").write_bytes(pickle.dumps(raw))
        findings = inspect_checkpoint(folder).findings
        assert "gap" in [finding.id for finding in findings]
        assert main(["diff", str(folder), str(folder)]) == 2
    entry.chunks = [ChunkStorageMetadata(torch.Size([2]), torch.Size([4]))]
    (folder / ".metadata").write_bytes(pickle.dumps(raw))
    assert main(["inspect", str(folder)]) == 2


def test_zip_bombs(tmp_path: Path) -> None:
    """A gigabyte that packs into a megabyte, as a common state and as a tensor."""
    source = saved({"iteration": 1, "x": torch.arange(4.0)})
    bomb = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(source)) as old,
        zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for entry in old.infolist():
            data = old.read(entry)
            if entry.filename.endswith(("data/0", "data.pkl")):
                data += b"\0" * (1 << 28)
            new.writestr(entry.filename, data)
    folder = write_checkpoint(tmp_path / "c", content=bomb.getvalue())
    (folder / "common.pt").write_bytes(bomb.getvalue())
    with counted() as memory, zipfile.ZipFile(folder / "common.pt") as archive:
        archive.read(next(name for name in archive.namelist() if name.endswith("data/0")))
    assert memory.peak_bytes > 1 << 28  # the measurement would see it go off
    with at_most(64 << 20):
        with pytest.raises(CheckpointError, match="cannot be read"):
            load_common(folder / "common.pt")
        with Checkpoint(folder) as checkpoint:
            entry = checkpoint.tensors["weight"]
            with pytest.raises(CheckpointError, match="tensor"):
                checkpoint.read_box(entry, whole((4,)))


@pytest.mark.parametrize("name", [".metadata", "common.pt", "__0_0.distcp", "metadata.json"])
def test_truncated_files(
    name: str, copy_of: Unpack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of("full_0.16.1")
    whole = (folder / name).read_bytes()
    for part in (0, 1, len(whole) // 2, len(whole) - 1):
        (folder / name).write_bytes(whole[:part])
        assert main(["diff", str(folder), str(folder)]) == 2
        assert main(["repair", str(folder), "--out", str(tmp_path / "r")]) == 2
    assert "unexpectedly" not in capsys.readouterr().err


def test_foreign_directories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "a" / "empty"
    empty.mkdir(parents=True)
    assert "empty directory" in commands_refuse(empty, capsys)
    foreign = tmp_path / "b" / "hf"
    foreign.mkdir(parents=True)
    (foreign / "model-00001-of-00001.safetensors").write_bytes(b"\0" * 8)
    (foreign / "config.json").write_text("{}")
    assert "safetensors" in commands_refuse(foreign, capsys)
    parent = tmp_path / "d" / "save"
    (parent / "iter_0000010").mkdir(parents=True)
    (parent / "latest_checkpointed_iteration.txt").write_text("10")
    assert "iter_" in commands_refuse(parent, capsys)
    unfinished = write_checkpoint(tmp_path / "f" / "c")
    (unfinished / ".metadata").unlink()
    assert "did not finish" in commands_refuse(unfinished, capsys)
    fsdp = write_checkpoint(tmp_path / "g" / "c")
    (fsdp / "metadata.json").write_text('{"sharded_backend": "fsdp_dtensor"}')
    assert "fsdp_dtensor" in commands_refuse(fsdp, capsys)
    assert "no checkpoint directory" in commands_refuse(tmp_path / "h" / "none", capsys)


def test_names_with_terminal_escapes_are_printed_plainly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_checkpoint(tmp_path / "c")
    raw = pickle.loads((folder / ".metadata").read_bytes())
    raw.state_dict_metadata["\x1b]0;title\x07key"] = raw.state_dict_metadata.pop("weight")
    (folder / ".metadata").write_bytes(pickle.dumps(raw))
    main(["inspect", str(folder), "--tree"])
    main(["diff", str(folder), str(folder)])
    output = capsys.readouterr()
    assert "\\x1b" in output.out
    assert "\x1b" not in output.out + output.err


@pytest.mark.parametrize(
    "index",
    [
        {"weight_map": {"x": "../f.safetensors"}},
        {"weight_map": {"x": "/f.safetensors"}},
        {"weight_map": {"x": "missing.safetensors"}},
        {"weight_map": ["x"]},
        {"weight_map": {"x": 3}},
        {"weight_map": {}, "metadata": [1]},
        [],
        None,
    ],
)
def test_hostile_export_indexes(index: Any, tmp_path: Path) -> None:
    (tmp_path / "e").mkdir()
    (tmp_path / "f.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    (tmp_path / "e" / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(CheckpointError):
        open_tensors(tmp_path / "e")
    assert main(["import", str(tmp_path / "e"), "--out", str(tmp_path / "o")]) == 2

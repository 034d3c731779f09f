"""What somebody who may write to a checkpoint directory can put there, one function a kind.

Each changes a copy of a real checkpoint. None may run code (`SIGN` would be there), hang, take
memory without a bound, or load as if nothing were wrong.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vime_optim.files.manifest import MANIFEST_MARK, MANIFEST_NAME, _check_of

SIGN = "went_off"
Change = Callable[[Path], None]
HASH_BOMB = b"\x80\x02}K\x01\x85" + b"2\x86" * 64 + b"K\x01s."
"""A dict whose key is a tuple of the same tuple twice, 64 deep."""


class Bomb:
    """Unpickled the usual way, it makes a directory beside the checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.path = folder.parent / SIGN

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def archive_with(content: bytes) -> bytes:
    """A torch.save archive whose pickle is `content`."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/version", b"3\n")
    return buffer.getvalue()


def metadata_of(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def rewrite(folder: Path, metadata: Any) -> None:
    """Metadata as somebody writes it who knows of the manifest: it is gone without a trace."""
    vars(metadata).pop(MANIFEST_MARK, None)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (folder / MANIFEST_NAME).unlink(missing_ok=True)


def unsigned(folder: Path) -> Any:
    metadata = metadata_of(folder)
    rewrite(folder, metadata)
    return metadata


def _replace_item(folder: Path, wanted: Callable[[Any], bool], blob: bytes) -> None:
    metadata = unsigned(folder)
    for index, info in metadata.storage_data.items():
        if wanted(index):
            path = folder / info.relative_path
            info.offset, info.length = path.stat().st_size, len(blob)
            with path.open("ab") as file:
                file.write(blob)
    rewrite(folder, metadata)


def _objects(folder: Path, blob: bytes) -> None:
    _replace_item(folder, lambda index: index.offset is None, blob)


def _tensors(folder: Path, blob: bytes) -> None:
    _replace_item(folder, lambda index: index.offset is not None, blob)


def _common(folder: Path, blob: bytes) -> None:
    unsigned(folder)
    if (folder / "common.pt").exists():
        (folder / "common.pt").write_bytes(blob)
    else:
        _objects(folder, blob)


def _metadata(folder: Path, blob: bytes) -> None:
    unsigned(folder)
    (folder / ".metadata").write_bytes(blob)


def _planner_bomb(folder: Path) -> None:
    metadata = unsigned(folder)
    metadata.planner_data = {"x": Bomb(folder)}
    rewrite(folder, metadata)


def _cyclic() -> bytes:
    loop: list[Any] = []
    loop.append(loop)
    return saved([{"x": loop}])


def _shared() -> bytes:
    """A list that holds the one below twice, 30 deep: 2**30 leaves."""
    value: list[Any] = [1]
    for _ in range(30):
        value = [value, value]
    return saved([{"x": value}])


def _zip_bomb() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * (1 << 28))
    return buffer.getvalue()


def _places(change: Callable[[Any], None]) -> Change:
    def apply(folder: Path) -> None:
        metadata = unsigned(folder)
        for info in metadata.storage_data.values():
            change(info)
        rewrite(folder, metadata)

    return apply


def _set(name: str, value: Any) -> Change:
    return _places(lambda info: setattr(info, name, value))


def _sizes(value: int) -> Change:
    """Tensors that no file can hold."""

    def apply(folder: Path) -> None:
        metadata = unsigned(folder)
        for entry in metadata.state_dict_metadata.values():
            for chunk in getattr(entry, "chunks", ()):
                entry.size = chunk.sizes = torch.Size([value] * max(1, len(chunk.sizes)))
        rewrite(folder, metadata)

    return apply


def _without_optimizer(folder: Path) -> None:
    metadata = unsigned(folder)
    for key in [k for k in metadata.state_dict_metadata if "optimizer" in k]:
        del metadata.state_dict_metadata[key]
    for index in [i for i in metadata.storage_data if "optimizer" in i.fqn]:
        del metadata.storage_data[index]
    rewrite(folder, metadata)


def _file_of(folder: Path, kind: str) -> Path:
    if kind != "data":
        return folder / kind
    return max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)


def _pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def _endless(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def _sparse(path: Path) -> None:
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(60 << 30)


def _folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def _odd_file(kind: str, make: Callable[[Path], None]) -> Change:
    def apply(folder: Path) -> None:
        path = _file_of(folder, kind)
        if kind != MANIFEST_NAME:
            unsigned(folder)
        make(path)

    return apply


def _manifest(change: Callable[[dict[str, Any]], Any]) -> Change:
    """A manifest whose own digest is right, and what it says is not."""

    def apply(folder: Path) -> None:
        path = folder / MANIFEST_NAME
        body = json.loads(path.read_text())
        body.pop("check")
        change(body)
        path.write_text(json.dumps({**body, "check": _check_of(body)}))

    return apply


def _rename_entry(name: str) -> Change:
    def change(body: dict[str, Any]) -> None:
        first = sorted(body["files"])[0]
        body["files"][name] = body["files"].pop(first)

    return _manifest(change)


def _entry(name: str, value: Any) -> Change:
    return _manifest(lambda body: body["files"][sorted(body["files"])[0]].update({name: value}))


def _whole_manifest(name: str, value: Any) -> Change:
    return _manifest(lambda body: body.update({name: value}))


def _digests(digit: str) -> Change:
    """As many digests as there should be, of another's bytes."""

    def change(body: dict[str, Any]) -> None:
        for entry in body["files"].values():
            entry["chunks"] = digit * len(entry["chunks"])

    return _manifest(change)


DEEP_JSON = "[" * 200_000


def changes() -> dict[str, Change]:
    """Every kind, by name."""
    memo = b"\x80\x02Nr\xff\xff\xff\x7f."
    huge = b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"."
    found: dict[str, Change] = {
        "metadata runs code": lambda f: _metadata(f, pickle.dumps(Bomb(f))),
        "planner data run code": _planner_bomb,
        "common state runs code": lambda f: _common(f, saved({"x": Bomb(f)})),
        "objects run code": lambda f: _objects(f, saved([Bomb(f)])),
        "tensors run code": lambda f: _tensors(f, saved({"x": Bomb(f)})),
        "metadata hangs": lambda f: _metadata(f, HASH_BOMB),
        "common state hangs": lambda f: _common(f, archive_with(HASH_BOMB)),
        "objects hang": lambda f: _objects(f, archive_with(HASH_BOMB)),
        "tensors hang": lambda f: _tensors(f, archive_with(HASH_BOMB)),
        "metadata fill the memo": lambda f: _metadata(f, memo),
        "objects fill the memo": lambda f: _objects(f, archive_with(memo)),
        "metadata declare a tebibyte": lambda f: _metadata(f, huge),
        "objects declare a tebibyte": lambda f: _objects(f, archive_with(huge)),
        "objects hold themselves": lambda f: _objects(f, _cyclic()),
        "objects share themselves": lambda f: _objects(f, _shared()),
        "objects are a zip bomb": lambda f: _objects(f, _zip_bomb()),
        "tensors are a zip bomb": lambda f: _tensors(f, _zip_bomb()),
        "tensors are no tensors": lambda f: _tensors(f, saved([1])),
        "tensors of stride 0": lambda f: _tensors(f, saved(torch.zeros(1).expand(1 << 40))),
        "tensors no file can hold": _sizes(1 << 50),
        "no optimizer": _without_optimizer,
        "a lost manifest": lambda f: (f / MANIFEST_NAME).unlink(),
        "chunks of 2**45 bytes": _manifest(lambda body: body.update(chunk_bytes=1 << 45)),
        "chunks of a string": _manifest(lambda body: body.update(chunk_bytes="8")),
        "chunks of no bytes": _manifest(lambda body: body.update(chunk_bytes=0)),
        "manifest of 2**70 bytes": _entry("size_bytes", 1 << 70),
        "manifest of negative bytes": _entry("size_bytes", -1),
        "manifest of odd digests": _entry("chunks", "00"),
        "deep manifest": lambda f: (f / MANIFEST_NAME).write_text(DEEP_JSON) and None,
        "deep metadata.json": lambda f: (f / "metadata.json").write_text(DEEP_JSON) and None,
    }
    for name in ("../secret", "/etc/passwd", "a/b", "..", ""):
        found[f"manifest names {name!r}"] = _rename_entry(name)
    for name, value in (
        ("save_id", 3),
        ("save_id", None),
        ("version", "2"),
        ("version", None),
        ("format", None),
        ("files", None),
        ("files", []),
        ("files", {"x": 1}),
    ):
        found[f"manifest whose {name} is {value!r}"] = _whole_manifest(name, value)
    for name, value in (
        ("stamp", 3),
        ("stamp", None),
        ("stamp", []),
        ("size_bytes", "1"),
        ("size_bytes", 1.5),
        ("size_bytes", True),
        ("size_bytes", None),
        ("chunks", None),
        ("chunks", "zz"),
        ("stamp", {}),
        ("stamp", 1.5),
        ("size_bytes", {}),
        ("size_bytes", float("nan")),
        ("chunks", 7),
    ):
        found[f"manifest of a file whose {name} is {value!r}"] = _entry(name, value)
    for digit in "0f":
        found[f"digests of {digit} alone"] = _digests(digit)
    for name in (
        "../secret",
        "/dev/zero",
        "/etc/passwd",
        "x\0y",
        "missing.distcp",
        "a/b",
        "..",
        "",
    ):
        found[f"data in {name!r}"] = _set("relative_path", name)
    for offset in (-1, 1 << 62, 1 << 70, "1", None, 1.5):
        found[f"data at {offset!r}"] = _set("offset", offset)
    for length in (-1, 0, 10, 1 << 62, "1", None, 1.5):
        found[f"data of length {length!r}"] = _set("length", length)
    for kind in (".metadata", "metadata.json", "common.pt", MANIFEST_NAME, "data"):
        for word, make in (
            ("a pipe", _pipe),
            ("endless", _endless),
            ("sparse", _sparse),
            ("a folder", _folder),
        ):
            found[f"{kind} is {word}"] = _odd_file(kind, make)
    return found

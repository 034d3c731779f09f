"""torch DCP's read_data, without torch.load: tensors are read from their files into place.

Only what is exactly understood is read here: a plain torch.save archive of one contiguous tensor,
found by a restricted parser that executes nothing. Everything else goes to torch's own reader, and
is counted in status().
"""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from typing import Any

import torch

from vime_optim.counters import counters
from vime_optim.errors import CheckpointError
from vime_optim.files import checked
from vime_optim.files.filling import Source, ends_early
from vime_optim.files.geometry import Box, whole
from vime_optim.files.items import FileWindow, ImpossibleTensor, Layouts, audit_item
from vime_optim.files.plain import no_archive
from vime_optim.files.reading import BoxReader
from vime_optim.reshard.coded import Read, set_deferring, shard_of

_TORCH_READ = "tensors read by torch's reader, as their storage is not understood"


def is_understood(reader: Any) -> bool:
    """A reader of torch's own, on a local file system, without transformed streams."""
    from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader

    kind = type(reader)
    return (
        isinstance(reader, FileSystemReader)
        and kind.read_data is FileSystemReader.read_data
        and kind._slice_file is FileSystemReader._slice_file
        and type(getattr(reader, "fs", None)) is FileSystem
    )


def take_over(reader: Any) -> None:
    """Make an understood reader read in place."""
    reader.read_data = functools.partial(read_data, reader, reader.read_data)


def read_data(reader: Any, original: Any, plan: Any, planner: Any) -> Any:
    """What FileSystemReader.read_data does: fill what `planner` resolves each item to.

    Raises:
        CheckpointError: a file ends early or cannot be read; names the file and the key.
    """
    from torch.distributed.checkpoint.planner import LoadItemType

    tensors = [item for item in plan.items if item.type == LoadItemType.TENSOR]
    others = [item for item in plan.items if item.type != LoadItemType.TENSOR]
    stored = reader.storage_data
    tensors.sort(key=lambda item: (_place(stored[item.storage_index]), item.storage_offsets))
    left: list[Any] = []
    layouts = Layouts()
    set_deferring(planner, True)
    try:
        with BoxReader(_total_bytes(tensors, planner)) as boxes:
            for item in tensors:
                source = _locate(reader, boxes, layouts, item)
                if source is None:
                    left.append(item)
                elif not _start(boxes, source, item, planner):
                    # At once: some planners want a resolved item committed before the next one.
                    _read_by_torch(reader, original, plan, planner, item)
    finally:
        set_deferring(planner, False)
    for item in left:
        _read_by_torch(reader, original, plan, planner, item)
    try:
        for item in others:
            _note_whole(reader, item)
        return original(replace(plan, items=others), planner)
    except Exception:
        for item in others:  # which one was it?
            _ask_torch(reader, original, plan, planner, item)
        raise


def _place(info: Any) -> tuple[str, int]:
    return info.relative_path, info.offset


def _total_bytes(items: list[Any], planner: Any) -> int:
    metadata = getattr(planner, "metadata", None)
    tensors = metadata.state_dict_metadata if metadata is not None else {}
    total = 0
    for item in items:
        properties = getattr(tensors.get(item.storage_index.fqn), "properties", None)
        itemsize = properties.dtype.itemsize if properties is not None else 4
        total += item.lengths.numel() * itemsize
    return total


def _locate(reader: Any, boxes: BoxReader, layouts: Layouts, item: Any) -> Source | None:
    """Where an item's elements lie; None where its storage is not understood."""
    info = reader.storage_data[item.storage_index]
    if getattr(info, "transform_descriptors", None):
        return None
    path = os.fspath(reader.fs.concat_path(reader.path, info.relative_path))
    descriptor = boxes.open(path)
    key = item.storage_index.fqn
    size_bytes = os.fstat(descriptor).st_size
    if info.offset + info.length > size_bytes:
        raise ends_early(f"{path}: {key}", size_bytes, info.offset + info.length)
    try:
        layout = layouts.find(descriptor, info.offset, info.length, f"{path}: {key}")
    except ImpossibleTensor as error:
        error.where = f"{path}: {key}"
        raise
    except CheckpointError:
        return None  # torch may know how to read it, and says so where it does not
    box = Box(tuple(item.storage_offsets), tuple(item.lengths))
    if layout.strides_elem is not None or not box.is_within(layout.shape):
        return None
    place = (layout.start_bytes, layout.shape, box.offset, box.size)
    source = Source(path, key, layout.dtype, *place)
    checked.note(path, info.offset, layout.start_bytes)
    checked.note(path, *source.span(box))
    checked.note(path, source.span(whole(layout.shape))[1], info.offset + info.length)
    return source


def _start(boxes: BoxReader, source: Source, item: Any, planner: Any) -> bool:
    """Start to read one item, or note it; False where its destination is not a plain tensor."""
    target = planner.resolve_tensor(item).detach()
    shard = shard_of(target)
    if shard is not None and target.size() == item.lengths:
        size, stride = tuple(target.size()), target.stride()
        shard.reads.append(Read(source, size, stride, int(target.storage_offset())))
        planner.commit_tensor(item, target)
        return True
    plain = type(target) is torch.Tensor and target.layout is torch.strided
    if not plain or target.size() != item.lengths or target.device.type not in ("cpu", "cuda"):
        return False
    boxes.read(source, target, functools.partial(planner.commit_tensor, item, target))
    return True


def _note_whole(reader: Any, item: Any) -> tuple[str, Any]:
    """Note that torch's reader reads all of an item. Returns the file and the place in it."""
    info = reader.storage_data[item.storage_index]
    path = os.fspath(reader.fs.concat_path(reader.path, info.relative_path))
    checked.note(path, info.offset, info.offset + info.length)
    return path, info


def _read_by_torch(reader: Any, original: Any, plan: Any, planner: Any, item: Any) -> None:
    counters[_TORCH_READ] += 1
    path, info = _note_whole(reader, item)
    if not getattr(info, "transform_descriptors", None):
        _audit(path, info, item.storage_index.fqn)
    _ask_torch(reader, original, plan, planner, item)


def _audit(path: str, info: Any, key: str) -> None:
    """torch's reader runs what weights_only allows, hash bombs among it."""
    try:
        with open(path, "rb") as file:
            audit_item(FileWindow(file.fileno(), info.offset, info.length), info.length)
    except Exception as error:
        raise no_archive(f"{path}: {key}", error) from error


def _ask_torch(reader: Any, original: Any, plan: Any, planner: Any, item: Any) -> None:
    try:
        original(replace(plan, items=[item]), planner).wait()
    except CheckpointError:
        raise
    except Exception as error:
        info = reader.storage_data[item.storage_index]
        path = reader.fs.concat_path(reader.path, info.relative_path)
        raise no_archive(f"{path}: {item.storage_index.fqn}", error) from error

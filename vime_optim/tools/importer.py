"""Writes a Megatron checkpoint from an export, through torch.distributed.checkpoint itself.

Tensors are read and written in pieces of a bounded size; each piece becomes a chunk, which DCP and
Megatron put together again at load, whatever the parallel layout there.
"""

from __future__ import annotations

import inspect
import io
import json
import os
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save

from vime_optim.errors import CheckpointError
from vime_optim.files.dcp_metadata import dump_metadata, parse_metadata
from vime_optim.files.geometry import Box, tiles, whole
from vime_optim.files.plain import write_new
from vime_optim.files.safe_load import load_common, save_common
from vime_optim.tools.carry import common_from_index
from vime_optim.tools.export import NO_WEIGHTS
from vime_optim.tools.names import parse_key
from vime_optim.tools.output import new_directory, refuse_existing, refuse_inside
from vime_optim.tools.progress import Advance, progress
from vime_optim.tools.repair import CONFIG
from vime_optim.tools.safetensors_io import (
    StoredTensor,
    open_tensors,
    read_index,
    read_range,
)

DEFAULT_MEMORY_BYTES = 1 << 30
_CHUNK_BYTES = 64 << 20


@dataclass
class ImportReport:
    """What was written."""

    source: str
    target: str
    format: str
    tensors: int = 0
    bytes: int = 0
    objects: int = 0
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def import_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    show_progress: bool = False,
) -> ImportReport:
    """Writes an export as a torch_dist checkpoint of Megatron (fully_reshardable).

    An export of flat buckets becomes the dp_reshardable checkpoint that it came from.

    Raises:
        CheckpointError: the export is unfinished or damaged, or the target is in use.
    """
    folder, out = Path(source), Path(target)
    refuse_inside(folder, out)
    refuse_existing(out)
    index = read_index(folder)
    tensors = open_tensors(folder)
    metadata = index["metadata"]
    common, objects = _rest(folder, metadata)
    report = ImportReport(str(folder), str(out), str(metadata.get("format", "fully_reshardable")))
    if all(parse_key(name) is not None for name in tensors):
        report.notes.append(f"{NO_WEIGHTS}; Megatron loads the two together")
    report.tensors, report.objects = len(tensors), len(objects)
    report.bytes = sum(tensor.size_bytes for tensor in tensors.values())
    # torch.save of a piece and its bytes object both hold the piece: three of them at once, and the
    # memory of written ones comes back late. Of 32 MiB, up to 31 were used with twice the size, and
    # more on a busy machine; 15 to 22 with this one.
    chunk_bytes = max(4096, min(_CHUNK_BYTES, memory_bytes // 32))
    with (
        progress("importing", report.bytes, show_progress) as advance,
        new_directory(out) as partial,
    ):
        planner = _StreamingPlanner(tensors, objects, chunk_bytes, advance)
        _save(partial, planner)
        buffer = io.BytesIO()
        save_common(common, buffer)
        write_new(partial / "common.pt", buffer.getvalue())
        write_new(partial / "metadata.json", json.dumps(CONFIG).encode())
    return report


def _rest(folder: Path, metadata: dict[str, Any]) -> tuple[dict[Any, Any], dict[str, Any]]:
    try:
        common = common_from_index(metadata)
    except (AttributeError, TypeError) as error:
        raise CheckpointError(
            "The index of the export does not describe its optimizers.",
            where=str(folder),
            got=f"{type(error).__name__}: {error}"[:200],
            expected='"optimizers": [{"param_groups": [{...}]}]',
        ) from error
    objects: Any = {}
    if (folder / "common.pt").exists():
        common = load_common(folder / "common.pt")
    if (folder / "objects.pt").exists():
        objects = load_common(folder / "objects.pt")
    if not isinstance(common, dict) or not isinstance(objects, dict):
        raise CheckpointError("common.pt or objects.pt is not a dictionary.", where=str(folder))
    return common, objects


def _save(folder: Path, planner: _StreamingPlanner) -> None:
    writer = FileSystemWriter(folder, thread_count=1, single_file_per_rank=True)
    known = inspect.signature(save).parameters
    options: dict[str, Any] = {"no_dist": True} if "no_dist" in known else {}
    with warnings.catch_warnings():
        # One process writes on purpose; torch warns that there is no process group.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            save({}, storage_writer=writer, planner=planner, **options)
        except CheckpointException as failure:
            # torch's own is no Exception, and holds the one that matters (a full disk, a damaged
            # export) by rank; there is one rank.
            cause, _ = next(iter(failure.failures.values()))
            raise cause from None
    # The writer notes where it wrote, which was a temporary name.
    path = folder / ".metadata"
    noted = parse_metadata(path.read_bytes())
    path.unlink()
    write_new(path, dump_metadata(noted, {}))


class _StreamingPlanner(DefaultSavePlanner):
    """Plans from headers alone, and reads each piece when DCP's writer asks for it."""

    def __init__(
        self,
        tensors: dict[str, StoredTensor],
        objects: dict[str, Any],
        chunk_bytes: int,
        advance: Advance,
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensors, self._objects = tensors, objects
        self._chunk_bytes, self._advance = chunk_bytes, advance
        self._boxes: dict[MetadataIndex, Box] = {}

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, tensor in self._tensors.items():
            items += self._pieces(name, tensor)
        for key in self._objects:
            items.append(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO))
        self.plan = SavePlan(items, planner_data={})
        return self.plan

    def _pieces(self, name: str, tensor: StoredTensor) -> list[WriteItem]:
        limit = max(1, self._chunk_bytes // tensor.dtype.itemsize)
        items = []
        boxes = list(tiles(tensor.shape, limit)) or [whole(tensor.shape)]
        for number, box in enumerate(boxes):
            offsets = torch.Size(box.offset)
            index = MetadataIndex(name, offsets, number)
            self._boxes[index] = box
            data = TensorWriteData(
                chunk=ChunkStorageMetadata(offsets, torch.Size(box.size)),
                properties=TensorProperties(dtype=tensor.dtype),
                size=torch.Size(tensor.shape),
            )
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return items

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            buffer = io.BytesIO()
            save_common([self._objects[write_item.index.fqn]], buffer)
            return buffer
        tensor = self._tensors[write_item.index.fqn]
        box = self._boxes[write_item.index]
        piece = read_range(tensor, *box.flat_range(tensor.shape)).reshape(box.size)
        self._advance(piece.nbytes)
        return piece

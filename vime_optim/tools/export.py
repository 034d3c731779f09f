"""Writes a checkpoint's optimizer state (and its model, if wanted) as safetensors shards.

OUT/state-00001-of-00003.safetensors   tensors by canonical name, fp32 masters and moments
OUT/state.safetensors.index.json       name -> shard, format, step and param groups in plain JSON
OUT/common.pt, OUT/objects.pt          the rest of the checkpoint, for `import`

An interrupted export goes on where it stopped: a shard gets its name only when it is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from vime_optim.errors import CheckpointError
from vime_optim.files.items import carrier_dtype
from vime_optim.files.plain import sync_directory, write_whole
from vime_optim.files.safe_load import save_common
from vime_optim.tools.carry import carried_common, carried_objects, plain_groups
from vime_optim.tools.logical import BUCKET, MODEL, Logical, View, open_view
from vime_optim.tools.output import refuse_existing, refuse_inside
from vime_optim.tools.progress import Advance, progress
from vime_optim.tools.reader import Checkpoint
from vime_optim.tools.safetensors_io import DTYPE_NAMES, INDEX_NAME, header_bytes

NO_WEIGHTS = "optimizer state only: the model's weights are not in it"
PLAN_NAME = "export-plan.json"
SHARD_BYTES = 4 << 30
DEFAULT_MEMORY_BYTES = 1 << 30


@dataclass
class ExportReport:
    """What was written. `resumed` counts shards that an earlier run had finished."""

    source: str
    target: str
    format: str
    tensors: int = 0
    bytes: int = 0
    shards: int = 0
    resumed: int = 0
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def export_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    model: bool = False,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    show_progress: bool = False,
) -> ExportReport:
    """Exports a checkpoint.

    Args:
        model: also the model's weights.
        include: globs on canonical names; all when empty.
        exclude: globs of what to leave out.
        dtype: converts floating-point tensors; None keeps every bit.
        shard_bytes: size at which a new shard begins.

    Raises:
        CheckpointError: the checkpoint cannot be read, nothing is chosen, or the target holds
            something else than an unfinished export of the same.
    """
    out = Path(target)
    with Checkpoint(source) as checkpoint:
        refuse_inside(checkpoint.path, out)
        view = open_view(checkpoint)
        chosen = _choose(view, model, include, exclude)
        buckets = any(tensor.kind == BUCKET for tensor in view.tensors.values())
        report = ExportReport(str(source), str(out), "buckets" if buckets else "fully_reshardable")
        if buckets:
            report.notes.append(f"flat buckets keep their own names: {view.layout_problem}")
        if not any(tensor.kind == MODEL for tensor in chosen):
            report.notes.append(NO_WEIGHTS + " (--model adds them)")
        types = {t.name: _target_dtype(t, dtype) for t in chosen}
        shards = _split(chosen, types, shard_bytes)
        plan = _plan(checkpoint, shards, types)
        _prepare(out, plan)
        block_bytes = max(4096, min(4 << 20, memory_bytes // 32))
        total = sum(tensor.size_bytes for tensor in chosen)
        with progress("exporting", total, show_progress) as advance:
            for name, tensors in shards.items():
                if (out / name).exists():
                    report.resumed += 1
                    advance(sum(t.size_bytes for t in tensors))
                else:
                    _write_shard(view, out / name, tensors, types, block_bytes, advance)
        _write_rest(checkpoint, out, shards, types, report)
    return report


def _choose(
    view: View, model: bool, include: Sequence[str], exclude: Sequence[str]
) -> list[Logical]:
    chosen = [
        tensor
        for name, tensor in view.tensors.items()
        if (model or tensor.kind != MODEL)
        and (not include or any(fnmatchcase(name, glob) for glob in include))
        and not any(fnmatchcase(name, glob) for glob in exclude)
    ]
    if not chosen:
        raise CheckpointError(
            "Nothing is left to export.",
            where=str(view.checkpoint.path),
            got=f"{len(view.tensors)} tensors, none chosen",
            next_step="Widen --include, or add --model for the weights.",
        )
    for tensor in chosen:
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(
                "safetensors cannot hold this dtype.", where=tensor.name, got=str(tensor.dtype)
            )
    return chosen


def _target_dtype(tensor: Logical, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype


def _split(
    chosen: list[Logical], types: dict[str, torch.dtype], shard_bytes: int
) -> dict[str, list[Logical]]:
    groups: list[list[Logical]] = []
    filled = 0
    for tensor in chosen:
        size = tensor.numel * types[tensor.name].itemsize
        if not groups or (filled and filled + size > shard_bytes):
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += size
    count = len(groups)
    return {f"state-{i:05d}-of-{count:05d}.safetensors": g for i, g in enumerate(groups, 1)}


def _plan(
    checkpoint: Checkpoint, shards: dict[str, list[Logical]], types: dict[str, torch.dtype]
) -> dict[str, Any]:
    """What an unfinished export must agree with, to be gone on with."""
    digest = hashlib.sha256((checkpoint.path / ".metadata").read_bytes()).hexdigest()
    content = {
        shard: [[t.name, DTYPE_NAMES[types[t.name]], list(t.shape)] for t in tensors]
        for shard, tensors in shards.items()
    }
    return {"source_metadata_sha256": digest, "shards": content}


def _prepare(out: Path, plan: dict[str, Any]) -> None:
    path = out / PLAN_NAME
    if not path.exists():
        refuse_existing(out)
        out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(plan))
        return
    try:
        before = json.loads(path.read_text())
    except ValueError:
        before = None
    if before != plan:
        raise CheckpointError(
            "The output holds an unfinished export of something else.",
            where=str(out),
            next_step="Export with the same options as before, or into a new directory.",
        )


def _write_shard(
    view: View,
    path: Path,
    tensors: list[Logical],
    types: dict[str, torch.dtype],
    block_bytes: int,
    advance: Advance,
) -> None:
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(header_bytes([(t.name, types[t.name], t.shape) for t in tensors]))
        for tensor in tensors:
            for bits in view.stream(tensor, block_bytes):
                advance(bits.nbytes)
                if types[tensor.name] != tensor.dtype:
                    values = torch.from_numpy(bits).view(tensor.dtype).to(types[tensor.name])
                    bits = values.view(torch.uint8).numpy().view(carrier_dtype(values.dtype))
                file.write(bits.data)
        file.flush()
        os.fsync(file.fileno())
    os.rename(partial, path)


def _write_rest(
    checkpoint: Checkpoint,
    out: Path,
    shards: dict[str, list[Logical]],
    types: dict[str, torch.dtype],
    report: ExportReport,
) -> None:
    common = carried_common(checkpoint, report.format)
    save_common(common, out / "common.pt")
    save_common(carried_objects(checkpoint, report.format), out / "objects.pt")
    weight_map = {t.name: shard for shard, tensors in shards.items() for t in tensors}
    report.tensors, report.shards = len(weight_map), len(shards)
    report.bytes = sum(t.numel * types[t.name].itemsize for ts in shards.values() for t in ts)
    index = {
        "metadata": {
            "total_size": report.bytes,
            "written_by": "vime-optim export",
            "format": report.format,
            "iteration": common.get("iteration"),
            "optimizers": plain_groups(common),
        },
        "weight_map": weight_map,
    }
    write_whole(out / INDEX_NAME, json.dumps(index, indent=1).encode())
    (out / PLAN_NAME).unlink()
    sync_directory(out)

"""Says what a checkpoint directory holds and what is wrong with it. Reads no tensor's elements."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from vime_optim.errors import CheckpointError
from vime_optim.files.dcp_metadata import TensorEntry
from vime_optim.tools.common import OptimizerFacts, common_location, optimizer_facts
from vime_optim.tools.names import parse_key
from vime_optim.tools.reader import COMMON_STATE_KEY, Checkpoint

ERROR, WARNING, NOTE = "error", "warning", "note"
_LAYOUT_ARGS = (
    "world_size",
    "data_parallel_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)
_SHARD_FILE = re.compile(r"__(\d+)_(?:[0-9a-f]{8}_)?\d+\.distcp")


@dataclass
class Finding:
    """Something wrong or worth knowing. `id` is a fault of docs/faults.yml, or a plain word."""

    id: str
    severity: str
    what: str
    where: str
    todo: str


@dataclass
class TensorSummary:
    """Counts of one kind of tensors."""

    count: int = 0
    size_bytes: int = 0
    dtypes: dict[str, int] = field(default_factory=dict)


@dataclass
class InspectReport:
    """What `inspect` found; `to_dict` is what --json prints."""

    path: str
    step: int | None = None
    optimizer_steps: list[Any] = field(default_factory=list)
    sharding: str | None = None
    written_by: str = ""
    optimizer_backend: str | None = None
    layout: dict[str, Any] = field(default_factory=dict)
    model: TensorSummary = field(default_factory=TensorSummary)
    optimizer: TensorSummary = field(default_factory=TensorSummary)
    objects: int = 0
    files: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    tree: list[dict[str, Any]] = field(default_factory=list)

    def add(self, id: str, severity: str, what: str, where: str, todo: str) -> None:
        self.findings.append(Finding(id, severity, what, where, todo))

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == ERROR]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def inspect_checkpoint(path: str | os.PathLike[str], *, tree: bool = False) -> InspectReport:
    """Looks a checkpoint over.

    Args:
        tree: also list every tensor.

    Raises:
        CheckpointError: the directory is no torch_dist checkpoint, or its index cannot be read.
    """
    with Checkpoint(path) as checkpoint:
        report = InspectReport(str(checkpoint.path))
        _files(checkpoint, report)
        _tensors(checkpoint, report, tree)
        try:
            facts = optimizer_facts(checkpoint)
            _common(checkpoint, facts, report)
        except CheckpointError as error:
            report.add(
                "unreadable",
                ERROR,
                error.what,
                f"{error.where or ''}: {error.got or ''}".strip(": "),
                error.next_step or "Copy the file again from its source.",
            )
        return report


def _files(checkpoint: Checkpoint, report: InspectReport) -> None:
    with os.scandir(checkpoint.path) as entries:
        for entry in entries:
            report.files[entry.name] = entry.stat(follow_symlinks=False).st_size
            if entry.is_symlink():
                report.add(
                    "link",
                    WARNING,
                    "a file of the checkpoint is a symbolic link; these tools do not follow it",
                    entry.name,
                    "Put the file itself there.",
                )
    report.files = dict(sorted(report.files.items()))
    if checkpoint.config is None:
        report.add(
            "no-config",
            ERROR,
            "metadata.json is missing: Megatron does not take this for a checkpoint",
            "metadata.json",
            "If the save finished, `vime-optim repair` writes it again.",
        )
    ranks = {int(m[1]) for m in map(_SHARD_FILE.fullmatch, report.files) if m}
    report.layout["ranks_that_wrote"] = len(ranks)
    _missing_files(checkpoint, report)


def _missing_files(checkpoint: Checkpoint, report: InspectReport) -> None:
    needed: dict[str, int] = {}
    users: Counter[str] = Counter()
    places = [c.location for t in checkpoint.tensors.values() for c in t.chunks]
    for place in [*places, *checkpoint.objects.values()]:
        if place is not None:
            end = place.offset_bytes + place.length_bytes
            needed[place.file] = max(end, needed.get(place.file, 0))
            users[place.file] += 1
    for name, size in sorted(needed.items()):
        have = report.files.get(name)
        if have is None:
            what = f"a file is missing that holds {users[name]} items"
            report.add("missing-file", ERROR, what, name[:100], "Copy it from the source.")
        elif have < size:
            what = f"a file has {have} bytes where at least {size} are needed"
            report.add("truncated-file", ERROR, what, name[:100], "Copy it from the source.")


def _tensors(checkpoint: Checkpoint, report: InspectReport, tree: bool) -> None:
    report.objects = len(checkpoint.objects)
    for key, entry in checkpoint.tensors.items():
        summary = report.model if parse_key(key) is None else report.optimizer
        summary.count += 1
        summary.size_bytes += entry.size_bytes
        dtype = str(entry.dtype).removeprefix("torch.")
        summary.dtypes[dtype] = summary.dtypes.get(dtype, 0) + 1
        fault = _chunks_fault(entry)
        if fault is not None:
            todo = "The save did not finish or .metadata is damaged; use another checkpoint."
            report.add("gap", ERROR, f"a tensor is not whole: {fault}", key[:200], todo)
        if tree:
            line = {"key": key, "dtype": dtype, "shape": list(entry.shape)}
            report.tree.append({**line, "chunks": len(entry.chunks), "bytes": entry.size_bytes})


def _chunks_fault(entry: TensorEntry) -> str | None:
    fault = entry.cover_fault()
    if fault is None and any(c.location is None for c in entry.chunks if c.numel):
        return "a chunk has no place in any file"
    for chunk in entry.chunks:
        size_bytes = chunk.numel * entry.dtype.itemsize
        if chunk.location is not None and size_bytes > chunk.location.length_bytes:
            place = f"a place of {chunk.location.length_bytes} bytes"
            return fault or f"a chunk of {size_bytes} bytes has {place}"
    return fault


def _common(checkpoint: Checkpoint, facts: OptimizerFacts, report: InspectReport) -> None:
    common = checkpoint.common_state()
    report.step = _as_int(common.get("iteration"))
    report.sharding = facts.sharding
    report.optimizer_backend = facts.backend
    report.optimizer_steps = facts.steps
    report.written_by = _written_by(checkpoint)
    arguments = common.get("args")
    if isinstance(arguments, Namespace):
        known = vars(arguments)
        report.layout.update({name: known[name] for name in _LAYOUT_ARGS if name in known})
    _known_faults(checkpoint, facts, report)


def _as_int(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _written_by(checkpoint: Checkpoint) -> str:
    """Megatron records no version; these three forms tell its releases apart."""
    if COMMON_STATE_KEY in checkpoint.objects:
        return "megatron-core 0.19 or later (common state inside DCP)"
    if checkpoint.index.wrapped_by_megatron:
        return "megatron-core 0.15 or earlier (its own class around the DCP metadata)"
    return "megatron-core 0.16 to 0.18 (common.pt, plain DCP metadata)"


def _known_faults(checkpoint: Checkpoint, facts: OptimizerFacts, report: InspectReport) -> None:
    common = common_location(checkpoint)
    if facts.poisoned:
        what = f"{len(facts.poisoned)} per-rank lists of steps stand in the common state"
        todo = "`vime-optim repair DIR --out NEW` drops them; every tensor is in the shards."
        report.add("F2", ERROR, what, f"{common}: {facts.poisoned[0]}", todo)
    in_common = [path for key, path in facts.classes if key is None]
    if in_common:
        what = f"{len(in_common)} optimizer classes stand in the common state"
        todo = "`vime-optim repair DIR --out NEW` drops them. Never load with weights_only=False."
        report.add("F9", ERROR, what, f"{common}: {in_common[0]}", todo)
    in_objects = [(key, path) for key, path in facts.classes if key is not None]
    if in_objects:
        what = f"{len(in_objects)} optimizer classes stand in sharded objects"
        todo = "`vime-optim repair DIR --out NEW` drops them."
        report.add("F9", WARNING, what, f"{in_objects[0][0]}: {in_objects[0][1]}", todo)
    if facts.is_hybrid and facts.sharding == "dp_reshardable":
        what = "CPU offload in dp_reshardable: stock megatron-core 0.16 to 0.19 resumes at step 1"
        todo = "Load with vime_optim.install(), or export and import it as fully_reshardable."
        report.add("F3", WARNING, what, "optimizer step", todo)
    _step_faults(facts, report)


def _step_faults(facts: OptimizerFacts, report: InspectReport) -> None:
    groups = [(s.label, g) for s in facts.sources for g in s.groups]
    without = [label for label, group in groups if "step" not in group]
    if len(facts.steps) > 1:
        what = f"param groups stand at different steps: {facts.steps[:6]}"
        todo = "Only its author can know the right one; repair does not guess."
        report.add("steps", ERROR, what, groups[0][0], todo)
    elif groups and without:
        what = f"{len(without)} of {len(groups)} param groups have no step"
        todo = "`vime-optim repair` sets it where the other groups have one."
        severity = WARNING if facts.steps else NOTE
        report.add("no-step", severity, what, without[0], todo)

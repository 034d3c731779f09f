"""Writes a mended copy of a checkpoint that stock megatron-core loads under weights_only.

Mended: per-rank step lists in the common state (F2), optimizer classes in it or in sharded objects
(F9), steps missing from some param groups, a missing metadata.json. Tensors are never touched:
their files are linked or copied as they are, and what is changed of the objects goes into a file
of its own. Nothing is guessed: what cannot be derived is an error.
"""

from __future__ import annotations

import io
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from vime_optim.errors import CheckpointError
from vime_optim.files.dcp_metadata import Location, dump_metadata
from vime_optim.files.fastfile import digest_file
from vime_optim.files.manifest import (
    MANIFEST_MARK,
    MANIFEST_NAME,
    Manifest,
    check_file,
    read_manifest,
)
from vime_optim.files.plain import write_new
from vime_optim.files.safe_load import save_common, strip_classes, walk
from vime_optim.tools.common import (
    OptimizerFacts,
    common_location,
    optimizer_children,
    optimizer_facts,
    param_state_problem,
    plain_step,
)
from vime_optim.tools.inspect import inspect_checkpoint
from vime_optim.tools.output import (
    new_directory,
    refuse_existing,
    refuse_inside,
    share_file,
)
from vime_optim.tools.reader import COMMON_STATE_KEY, Checkpoint

CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""What releases up to 0.18 write into metadata.json; later ones ignore the last two."""

_MANIFESTS = ("integrity.json",)
"""Digests of all files, written on request by megatron-core 0.19 (validation.py)."""


@dataclass
class RepairPlan:
    """What repair does, or would do.

    Attributes:
        changes: one sentence each.
        files: how each file comes into the output: "hard link", "reflink", "copy", "new"; in a dry
            run "as it is" or "new".
    """

    source: str
    target: str
    dry_run: bool
    changes: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class _Work:
    """New content of what changes: files by name, objects by key."""

    files: dict[str, bytes] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)


def repair_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dry_run: bool = False,
    link: bool = True,
) -> RepairPlan:
    """Mends a checkpoint into a new directory.

    Args:
        dry_run: say what would be done, write nothing.
        link: hard links for unchanged files on the same file system; False copies (or reflinks).

    Raises:
        CheckpointError: the checkpoint is damaged in a way that cannot be mended without guessing,
            or the target is in use.
    """
    plan = RepairPlan(str(source), str(target), dry_run)
    with Checkpoint(source) as checkpoint:
        refuse_inside(checkpoint.path, Path(target))
        refuse_existing(Path(target))
        _refuse_damage(checkpoint)
        work = _Work()
        _mend_states(checkpoint, work, plan)
        _mend_config(checkpoint, work, plan)
        manifest = _old_manifest(checkpoint, plan)
        _pack_objects(checkpoint, work, manifest is not None)
        _drop_manifest(checkpoint, work, plan)
        if dry_run:
            plan.files = {name: "as it is" for name in _unchanged(checkpoint, work)}
            plan.files.update(dict.fromkeys(work.files, "new"))
        else:
            with new_directory(Path(target)) as folder:
                _write(checkpoint, work, folder, plan, link)
                if manifest is not None:
                    _write_manifest(manifest, folder, plan)
    return plan


def _refuse_damage(checkpoint: Checkpoint) -> None:
    """Missing data cannot be mended, whatever else could be."""
    lost = ("missing-file", "truncated-file", "gap", "unreadable", "steps")
    for finding in inspect_checkpoint(checkpoint.path).errors:
        if finding.id in lost:
            raise CheckpointError(
                f"This cannot be mended without guessing: {finding.what}.",
                where=f"{checkpoint.path}: {finding.where}",
                next_step=finding.todo,
            )


def _mend_states(checkpoint: Checkpoint, work: _Work, plan: RepairPlan) -> None:
    facts = optimizer_facts(checkpoint)
    common = checkpoint.common_state()
    listed = _listed_steps(common)
    changed: set[str | None] = set()
    if _drop_param_state(common, plan):
        changed.add(None)
    removed = strip_classes(common)
    if removed:
        plan.changes.append(f"common state: drop {len(removed)} optimizer classes ({removed[0]})")
        changed.add(None)
    for source in facts.sources:
        if source.key is not None:
            removed = strip_classes(source.holder)
            if removed:
                plan.changes.append(f"{source.key}: drop {len(removed)} optimizer classes")
                changed.add(source.key)
    changed |= _set_steps(facts, listed, plan)
    for key in changed:
        if key is not None:
            holder = next(s.holder for s in facts.sources if s.key == key)
            work.objects[key] = holder
        elif common_location(checkpoint) == COMMON_STATE_KEY:
            work.objects[COMMON_STATE_KEY] = common
        else:
            work.files["common.pt"] = _dump(common)


def _dump(state: Any) -> bytes:
    buffer = io.BytesIO()
    save_common(state, buffer)
    return buffer.getvalue()


def _listed_steps(common: dict[Any, Any]) -> set[Any]:
    """Steps in the per-rank lists; those of padding hold whatever memory held and do not count."""
    steps = set()
    for _, child in optimizer_children(common):
        for _, key, item, _ in walk(child.get("param_state", {})):
            if key == "step" and (not isinstance(item, torch.Tensor) or item.dim() == 0):
                steps.add(plain_step(item))
    return steps


def _drop_param_state(common: dict[Any, Any], plan: RepairPlan) -> bool:
    dropped = False
    for path, child in optimizer_children(common):
        if "param_state" not in child:
            continue
        problem = param_state_problem(child["param_state"])
        if problem is not None:
            raise CheckpointError(
                "The common state holds optimizer tensors, not only steps.",
                where=f"{path}.param_state.{problem}",
                expected="steps alone (fault F2)",
                next_step="Keep this checkpoint; its tensors are nowhere else.",
            )
        del child["param_state"]
        plan.changes.append(f"common state: drop the per-rank step lists at {path}.param_state")
        dropped = True
    return dropped


def _set_steps(facts: OptimizerFacts, listed: set[Any], plan: RepairPlan) -> set[str | None]:
    """Gives the groups that lack a step the one that all others agree on."""
    steps = set(facts.steps) or listed
    lacking = [(s, g) for s in facts.sources for g in s.groups if "step" not in g]
    if not lacking:
        return set()
    if len(steps) != 1 or not isinstance(next(iter(steps)), int):
        if listed or len(steps) > 1:
            raise CheckpointError(
                "Param groups have no step, and it cannot be derived.",
                where=lacking[0][0].label,
                got=f"steps {sorted(map(str, steps))[:6]}",
                expected="one step that all agree on",
                next_step="Only the author of the checkpoint can know it.",
            )
        return set()  # an optimizer that keeps no step, or has not stepped
    step = next(iter(steps))
    for _, group in lacking:
        group["step"] = step
    plan.changes.append(f"param groups: set step {step} in {len(lacking)} that had none")
    return {source.key for source, _ in lacking}


def _mend_config(checkpoint: Checkpoint, work: _Work, plan: RepairPlan) -> None:
    if checkpoint.config is None:
        plan.changes.append("metadata.json: written again (torch_dist, version 1)")
        work.files["metadata.json"] = json.dumps(CONFIG).encode()


def _old_manifest(checkpoint: Checkpoint, plan: RepairPlan) -> Manifest | None:
    try:
        manifest = read_manifest(checkpoint.path)
    except CheckpointError:
        plan.changes.append(f"{MANIFEST_NAME}: left out, as it is damaged")
        return None
    if manifest is not None:
        plan.changes.append(f"{MANIFEST_NAME}: written again, for the files of the copy")
    return manifest


def _write_manifest(old: Manifest, folder: Path, plan: RepairPlan) -> None:
    """Files that were only linked or copied keep their digests; those that are new get their own.

    Raises:
        CheckpointError: a file is not the one that the old manifest names.
    """
    made = Manifest(chunk_bytes=old.chunk_bytes)
    for name, how in plan.files.items():
        record = old.records.get(name)
        if how == "new" or record is None:
            made.add(digest_file(folder / name, name, made.chunk_bytes))
            continue
        for problem in check_file(folder, record):
            raise CheckpointError(
                "A file is not the one that was saved.",
                where=f"{plan.source}: {problem.file}",
                got=problem.what,
                next_step="Copy it again; `vime-optim check` names every such file.",
            )
        made.add(record)
    made.write(folder)
    plan.files[MANIFEST_NAME] = "new"


def _pack_objects(checkpoint: Checkpoint, work: _Work, has_manifest: bool) -> None:
    """Puts changed objects into one new file and points the metadata there.

    Metadata that say that a manifest was written are written again where the copy has none.
    """
    marked = getattr(checkpoint.index.raw, MANIFEST_MARK, False)
    attributes = {MANIFEST_MARK: True} if has_manifest else {}
    if not work.objects:
        if marked and not has_manifest:
            work.files[".metadata"] = dump_metadata(checkpoint.index, {})
        return
    packed, located = b"", {}
    names = map("__0_mended{}.distcp".format, range(1000))
    name = next(name for name in names if not (checkpoint.path / name).exists())
    for key, value in sorted(work.objects.items()):
        data = _dump([value])  # DCP holds Megatron's objects as lists of one
        located[key] = Location(name, len(packed), len(data))
        packed += data
    work.files[name] = packed
    work.files[".metadata"] = dump_metadata(checkpoint.index, located, attributes)


def _drop_manifest(checkpoint: Checkpoint, work: _Work, plan: RepairPlan) -> None:
    for name in _manifests(checkpoint):
        if work.files:
            plan.changes.append(f"{name}: left out, as its digests are of the old files")


def _manifests(checkpoint: Checkpoint) -> list[str]:
    return [name for name in _MANIFESTS if (checkpoint.path / name).exists()]


def _unchanged(checkpoint: Checkpoint, work: _Work) -> list[str]:
    skipped = {MANIFEST_NAME, *(_manifests(checkpoint) if work.files else ())}
    return sorted(
        entry.name
        for entry in os.scandir(checkpoint.path)
        if entry.is_file(follow_symlinks=False)
        and entry.name not in work.files
        and entry.name not in skipped
    )


def _write(checkpoint: Checkpoint, work: _Work, folder: Path, plan: RepairPlan, link: bool) -> None:
    for name in _unchanged(checkpoint, work):
        source = checkpoint.open_file(name)
        plan.files[name] = share_file(source, checkpoint.path / name, folder / name, link=link)
    # metadata.json last: its presence means that the checkpoint is whole.
    for name, data in sorted(work.files.items(), key=lambda item: item[0] == "metadata.json"):
        write_new(folder / name, data)
        plan.files[name] = "new"

"""What the common state and the sharded objects say of the optimizer: format, groups, steps."""

from __future__ import annotations

import types
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from vime_optim.files.safe_load import walk
from vime_optim.files.stand_ins import is_inert_class
from vime_optim.tools.names import parse_object_key
from vime_optim.tools.reader import COMMON_STATE_KEY, Checkpoint

HYBRID_KEYS = ("cpu_optimizer_cls", "gpu_optimizer_cls", "offload_fraction", "pin_cpu_grads")


@dataclass
class GroupSource:
    """One place that holds param groups.

    Attributes:
        label: common state path or object key, for people.
        key: the object's key, or None for the common state.
        holder: the dict that has `param_groups`; changing it changes what was loaded.
    """

    label: str
    key: str | None
    holder: dict[Any, Any]

    @property
    def groups(self) -> list[dict[Any, Any]]:
        groups = self.holder.get("param_groups")
        found = groups if isinstance(groups, list) else []
        return [group for group in found if isinstance(group, dict)]


@dataclass
class OptimizerFacts:
    """What is known of the optimizer without its tensors.

    `poisoned` are the dotted paths of per-rank lists in the common state (F2); `classes` those of
    optimizer classes, with the key of the object that holds them or None for the common state (F9).
    """

    sharding: str | None = None
    sources: list[GroupSource] = field(default_factory=list)
    poisoned: list[str] = field(default_factory=list)
    classes: list[tuple[str | None, str]] = field(default_factory=list)
    cpu_offload: bool = False
    """Whether the job's own arguments, where they are saved, asked for it."""

    @property
    def steps(self) -> list[Any]:
        """Distinct steps of all groups that have one, as plain numbers."""
        found = {plain_step(g["step"]) for s in self.sources for g in s.groups if "step" in g}
        return sorted(found, key=lambda step: (str(type(step)), str(step)))

    @property
    def backend(self) -> str | None:
        """The optimizer that saved it, in words; judged by the keys of its groups."""
        groups = [group for source in self.sources for group in source.groups]
        if not groups:
            return None
        keys = set().union(*groups)
        if keys & set(HYBRID_KEYS):
            fraction = next((g["offload_fraction"] for g in groups if "offload_fraction" in g), "?")
            return f"HybridDeviceOptimizer (CPU offload, fraction {fraction})"
        # install() leaves those keys out; what is left are the groups of both halves in one.
        if self.cpu_offload or {"bias_correction", "fused"} <= keys:
            return "HybridDeviceOptimizer (CPU offload)"
        if "amsgrad" in keys:
            return "torch Adam or AdamW"
        if "bias_correction" in keys:
            return "FusedAdam (Transformer Engine or Apex)"
        if "momentum" in keys:
            return "SGD"
        return None

    @property
    def is_hybrid(self) -> bool:
        return (self.backend or "").startswith("Hybrid")


def plain_step(value: Any) -> Any:
    """A step as int where it is one; steps come as int, float or 0-dim tensors."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            return f"a tensor of {value.numel()} elements"
        value = value.item()
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int | float) else type(value).__name__


def optimizer_children(common: dict[Any, Any]) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Path and state of each optimizer in the common state; a chained one has several."""
    root = common.get("optimizer")
    if not isinstance(root, dict):
        return
    children = {k: v for k, v in root.items() if isinstance(k, int) and isinstance(v, dict)}
    if not children:
        yield "optimizer", root
    for index, child in children.items():
        yield f"optimizer.{index}", child


def optimizer_facts(checkpoint: Checkpoint) -> OptimizerFacts:
    """Reads the common state and the small objects of the distributed optimizer.

    Raises:
        CheckpointError: one of them cannot be read.
    """
    facts = OptimizerFacts()
    common = checkpoint.common_state()
    facts.cpu_offload = bool(getattr(common.get("args"), "optimizer_cpu_offload", False))
    content = common.get("content_metadata")
    if isinstance(content, dict) and content.get("distrib_optim_sharding_type"):
        facts.sharding = str(content["distrib_optim_sharding_type"])
    for path, child in optimizer_children(common):
        facts.sharding = str(child.get("param_state_sharding_type", facts.sharding))
        inner = child.get("optimizer")
        if isinstance(inner, dict) and "param_groups" in inner:
            facts.sources.append(GroupSource(f"{path}.optimizer", None, inner))
        if "param_state" in child:
            facts.poisoned += _per_rank_lists(child["param_state"], f"{path}.param_state")
    facts.classes += [(None, path) for _, _, item, path in walk(common) if is_inert_class(item)]
    for key in checkpoint.objects:
        meaning = parse_object_key(key)
        if meaning is None or meaning.name != "optimizer":
            continue
        value = checkpoint.read_object(key)
        if isinstance(value, dict):
            facts.sources.append(GroupSource(key, key, value))
            facts.classes += [(key, path) for _, _, v, path in walk(value) if is_inert_class(v)]
    return facts


def _per_rank_lists(state: Any, path: str) -> list[str]:
    found = [dotted for _, _, item, dotted in walk(state, path) if isinstance(item, list) and item]
    return [p for p in found if not any(p.startswith(other + ".") for other in found)]


def param_state_problem(state: Any) -> str | None:
    """Why a param state in the common state may not be dropped: it holds more than steps."""
    for _, key, item, path in walk(state):
        if isinstance(item, torch.Tensor) and key != "step":
            return f"{path} is a tensor of {item.numel()} elements"
    return None


def plain_scalars(value: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of nested dicts, lists and namespaces by dotted path; a tensor is a leaf."""
    flat: dict[str, Any] = {}
    seen: set[int] = set()
    stack: list[tuple[str, Any]] = [(prefix, value)]
    while stack:
        path, item = stack.pop()
        children: list[tuple[Any, Any]] = []
        if isinstance(item, Namespace | types.SimpleNamespace):
            children = list(vars(item).items())
        elif isinstance(item, dict):
            children = list(item.items())
        elif isinstance(item, list | tuple):
            children = list(enumerate(item))
        if not children:
            flat[path] = item
            continue
        if id(item) in seen:
            continue
        seen.add(id(item))
        for key, child in children:
            stack.append((f"{path}.{key}" if path else str(key), child))
    return flat


def common_location(checkpoint: Checkpoint) -> str:
    """Where the common state lives, in words."""
    if (checkpoint.path / "common.pt").exists():
        return "common.pt"
    return COMMON_STATE_KEY

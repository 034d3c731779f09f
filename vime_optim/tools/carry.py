"""What goes along with the tensors on an export, and comes back on an import."""

from __future__ import annotations

import copy
from typing import Any

import torch

from vime_optim.files.safe_load import strip_classes
from vime_optim.tools.common import optimizer_children, plain_step
from vime_optim.tools.names import parse_object_key
from vime_optim.tools.reader import COMMON_STATE_KEY, Checkpoint

FULLY_RESHARDABLE_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}
_BUCKET_OBJECTS = ("per_bucket_numel", "per_bucket_numel_unpadded")


def carried_common(checkpoint: Checkpoint, format: str) -> dict[Any, Any]:
    """A clean common state; for "fully_reshardable" with the optimizer as that format has it.

    dp_reshardable keeps param groups in objects, fully_reshardable in the common state.
    """
    common = dict(checkpoint.common_state())
    strip_classes(common)
    if "optimizer" not in common:
        return common
    children = {path: dict(child) for path, child in optimizer_children(common)}
    for child in children.values():
        child.pop("param_state", None)
    if format == "fully_reshardable":
        for key in checkpoint.objects:
            meaning = parse_object_key(key)
            if meaning is None or meaning.name in _BUCKET_OBJECTS:
                continue
            number = meaning.chain.removeprefix("chained_").rstrip(".")
            path = f"optimizer.{number}" if f"optimizer.{number}" in children else "optimizer"
            if path in children and meaning.name not in children[path]:
                value = copy.deepcopy(checkpoint.read_object(key))
                strip_classes(value)
                children[path][meaning.name] = value
        for child in children.values():
            child["param_state_sharding_type"] = "fully_reshardable"
        content = common.get("content_metadata")
        content = dict(content) if isinstance(content, dict) else {}
        common["content_metadata"] = {**content, **FULLY_RESHARDABLE_METADATA}
    if set(children) == {"optimizer"}:
        common["optimizer"] = children["optimizer"]
    else:
        common["optimizer"] = {int(path.split(".")[1]): c for path, c in children.items()}
    return common


def carried_objects(checkpoint: Checkpoint, format: str) -> dict[str, Any]:
    """Sharded objects to keep: RNG and extra state, and the optimizer's own for buckets."""
    kept = {}
    for key in checkpoint.objects:
        if key == COMMON_STATE_KEY:
            continue
        if parse_object_key(key) is None or format == "buckets":
            value = checkpoint.read_object(key)
            strip_classes(value)
            kept[key] = value
    return kept


def plain_groups(common: dict[Any, Any]) -> list[dict[str, Any]]:
    """Param groups of each optimizer in plain JSON, for people and for other trainers."""
    result = []
    for _, child in optimizer_children(common):
        inner = child.get("optimizer")
        groups = inner.get("param_groups", []) if isinstance(inner, dict) else []
        result.append({"param_groups": [_plain_group(group) for group in groups]})
    return result


def _plain_group(group: dict[Any, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, value in group.items():
        if isinstance(value, torch.Tensor):
            value = plain_step(value)
        if isinstance(value, tuple):
            value = list(value)
        if _is_plain(value) or (isinstance(value, list) and all(map(_is_plain, value))):
            plain[str(key)] = value
    return plain


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def common_from_index(metadata: dict[str, Any]) -> dict[str, Any]:
    """A common state from the index alone, for exports that another trainer wrote."""
    children = []
    for optimizer in metadata.get("optimizers") or []:
        groups = [
            {k: tuple(v) if isinstance(v, list) else v for k, v in group.items()}
            for group in optimizer.get("param_groups", [])
        ]
        children.append(
            {
                "optimizer": {"param_groups": groups},
                "param_state_sharding_type": "fully_reshardable",
            }
        )
    common: dict[str, Any] = {
        "checkpoint_version": 3.0,
        "iteration": metadata.get("iteration") or 0,
        "content_metadata": dict(FULLY_RESHARDABLE_METADATA),
    }
    if children:
        common["optimizer"] = children[0] if len(children) == 1 else dict(enumerate(children))
    return common

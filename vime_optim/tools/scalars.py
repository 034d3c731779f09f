"""Compares what is not a model or optimizer tensor: counters, param groups, RNG and extra state."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import torch

from vime_optim.files.stand_ins import is_inert_class
from vime_optim.tools.bits import same_bits
from vime_optim.tools.common import (
    GroupSource,
    optimizer_facts,
    plain_scalars,
    plain_step,
)
from vime_optim.tools.names import parse_object_key
from vime_optim.tools.reader import COMMON_STATE_KEY, Checkpoint

_SKIPPED = ("optimizer", "content_metadata")
"""Compared elsewhere, and the name of the format, which may differ."""


def compare_scalars(a: Checkpoint, b: Checkpoint) -> list[dict[str, Any]]:
    """Every scalar that differs: {"name", "a", "b"}; a missing one is given as None."""
    left, right = checkpoint_scalars(a), checkpoint_scalars(b)
    missing = object()
    differing = []
    for name in sorted(left.keys() | right.keys()):
        x, y = left.get(name, missing), right.get(name, missing)
        if x is missing or y is missing or not same_value(x, y):
            differing.append(
                {
                    "name": name,
                    "a": None if x is missing else _short(x),
                    "b": None if y is missing else _short(y),
                }
            )
    return differing


def checkpoint_scalars(checkpoint: Checkpoint) -> dict[str, Any]:
    """Scalars of the common state, the param groups and the sharded objects, by dotted path.

    Optimizer classes are left out: they are a fault (F9), not state.
    """
    common = {k: v for k, v in checkpoint.common_state().items() if k not in _SKIPPED}
    scalars = plain_scalars(common)
    chosen: dict[str, GroupSource] = {}
    for source in sorted(optimizer_facts(checkpoint).sources, key=lambda s: s.label):
        chosen.setdefault(_child(source), source)  # all data-parallel groups hold the same groups
    for child, source in chosen.items():
        scalars.update(plain_scalars(source.holder, f"optimizer.{child}"))
    for key in checkpoint.objects:
        if parse_object_key(key) is None and key != COMMON_STATE_KEY:
            scalars.update(plain_scalars(checkpoint.read_object(key), key))
    return {name: value for name, value in scalars.items() if not is_inert_class(value)}


def _child(source: GroupSource) -> str:
    """Which of a chained optimizer's children a source belongs to; "0" for a single one."""
    if source.key is None:
        parts = source.label.split(".")
        return parts[1] if parts[1].isdigit() else "0"
    meaning = parse_object_key(source.key)
    chain = meaning.chain if meaning is not None else ""
    return chain.removeprefix("chained_").rstrip(".") or "0"


def same_value(x: Any, y: Any) -> bool:
    """Bitwise equality of two scalars; a whole number equals itself as int, float or tensor."""
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and x.numel() != 1:
        return same_bits(x, y)
    if isinstance(x, np.ndarray) or isinstance(y, np.ndarray):
        a, b = np.asarray(x), np.asarray(y)
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(x, io.BytesIO) and isinstance(y, io.BytesIO):
        return x.getvalue() == y.getvalue()
    x, y = _plain(x), _plain(y)
    if isinstance(x, float) and isinstance(y, float):
        return struct.pack("<d", x) == struct.pack("<d", y)
    return type(x) is type(y) and bool(x == y)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return value
    return plain_step(value) if isinstance(value, torch.Tensor | int | float) else value


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, torch.Tensor) else f"tensor {tuple(value.shape)}"
    return text if len(text) <= 60 else text[:57] + "..."

"""Records a training run bit by bit: losses, gradient norm, parameters and optimizer, each step."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

START_S = time.monotonic()


class Record:
    """What one rank saw. Written as JSON when the rank ends, whatever the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps: dict[str, dict[str, Any]] = {}
        self.events: list[str] = []

    def note(self, text: str) -> None:
        self.events.append(f"{time.monotonic() - START_S:.1f}s {text}")

    def write(self, error: str | None) -> None:
        answer = {
            "error": error,
            "time_s": time.time(),
            "steps": self.steps,
            "events": self.events,
            **_library(),
        }
        partial = self.path.with_suffix(".part")
        partial.write_text(json.dumps(answer, indent=1))
        partial.rename(self.path)


def _library() -> dict[str, Any]:
    import vime_optim

    report = vime_optim.status()
    return {
        "installed": report.installed,
        "hits": {fix: count for fix, count in report.hits.items() if count},
        "not_understood": sorted(
            f"{row.fix}: {row.target}: {row.reason}"
            for row in report.rows
            if row.verdict == "not understood"
        ),
        "counters": dict(report.counters),
    }


def watch(record: Record) -> None:
    """Wrap megatron.training's step, save and load, so that `record` sees them."""
    from megatron.training import get_args, training

    original = training.train_step

    def train_step(
        forward_step: Any, iterator: Any, model: Any, optimizer: Any, *rest: Any, **options: Any
    ) -> Any:
        result = original(forward_step, iterator, model, optimizer, *rest, **options)
        record.steps[str(get_args().curr_iteration + 1)] = {
            "loss": {name: _exact(value) for name, value in (result[0] or {}).items()},
            "grad_norm": _exact(_grad_norm(result)),
            "lr": [_exact(group["lr"]) for group in optimizer.param_groups],
            "parameters": {
                f"{number}.{name}": digest([parameter])
                for number, chunk in enumerate(model)
                for name, parameter in chunk.named_parameters()
            },
            "optimizer": _optimizer_state(optimizer),
        }
        return result

    training.train_step = train_step
    for name in ("save_checkpoint", "load_checkpoint"):
        setattr(training, name, _noted(record, name, getattr(training, name)))


def _noted(record: Record, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        record.note(f"{name} starts")
        result = original(*args, **kwargs)
        record.note(f"{name} done")
        return result

    return noted


def _grad_norm(result: Any) -> Any:
    """Of what train_step returns the first number behind the flags; its place moved in 0.17."""
    numbers = [value for value in result[3:] if isinstance(value, float) or hasattr(value, "numel")]
    return numbers[0] if numbers else None


def _exact(value: Any) -> Any:
    if hasattr(value, "detach"):
        value = value.detach().cpu().flatten().tolist()
    if isinstance(value, list | tuple):
        return [_exact(item) for item in value]
    return value.hex() if isinstance(value, float) else value


def digest(tensors: Iterable[Any]) -> str:
    import torch

    total = hashlib.sha256()
    for tensor in tensors:
        tensor = tensor.detach()
        if "dequantize" in type(tensor).__dict__:  # Transformer Engine's fp8, a tensor in parts
            tensor = tensor.dequantize()
        flat = tensor.cpu().contiguous().reshape(-1)
        total.update(flat.view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


def _optimizer_state(optimizer: Any) -> dict[str, Any]:
    """Digests of masters and moments, and the steps, read from the innermost optimizers."""
    from vime_optim.verify.capture import parameter_states

    if not hasattr(_first(optimizer), "gbuf_ranges"):
        return {}
    states = list(parameter_states(optimizer))
    kinds = sorted({kind for state in states for kind in state.tensors})
    return {
        "master": digest(state.master for state in states),
        **{
            kind: digest(state.tensors[kind] for state in states if kind in state.tensors)
            for kind in kinds
        },
        "step": [state.step for state in states],
    }


def _first(optimizer: Any) -> Any:
    return getattr(optimizer, "chained_optimizers", [optimizer])[0]

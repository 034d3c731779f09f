"""Says which known fault of stock megatron-core a failure looks like."""

from __future__ import annotations

import json
from pathlib import Path

from vime_optim.verify.compare import REPLICAS_DISAGREE
from vime_optim.verify.runner import Outcome

#: Fault id, error type ("" for a silent difference), and a text that the error or traceback holds.
_ERRORS = (
    ("F1", "AssertionError", "torch.Size([])"),
    ("F2", "ValueError", "Cannot merge two lists"),
    ("F5", "KeyError", "_update_fp32_params_by_new_state"),
    ("F6", "AttributeError", "'bool' object has no attribute 'dtype'"),
    ("F7", "AssertionError", "set_scaled_state"),
    ("F8", "AssertionError", "len(steps) == 1"),
    ("F9", "UnpicklingError", "Weights only load failed"),
    ("F16", "CheckpointingException", "flattened_range is not supported"),
    ("F22", "AssertionError", "empty bucket encountered"),
    ("F29", "AssertionError", "steps: [tensor("),
)

#: Causes by fault id, which docs/generate.py takes from docs/faults.yml.
_CAUSES = Path(__file__).with_name("causes.json")

#: What is no entry of docs/faults.yml.
_TEXTS = {
    "shifted": "with several padded buckets fully_reshardable cuts parameters at padded offsets"
    " out of an unpadded tensor, so what it stores is shifted",
    "tied halves": "one stage updates its copy of the tied embedding on the host and another on the"
    " device, which round differently: the copies drift apart in the first run too"
    " (--offload-fraction 1.0 keeps them equal)",
}


def explain(outcome: Outcome) -> list[str]:
    """Lines such as "F9: Optimizer classes lie in the common state ..."; may be empty."""
    texts = _TEXTS | json.loads(_CAUSES.read_text(encoding="utf-8"))
    return [f"{fault}: {texts[fault]}" for fault in faults(outcome)]


def faults(outcome: Outcome) -> list[str]:
    """Ids of the known faults that the outcome looks like."""
    if outcome.error is not None:
        text = f"{outcome.error}\n{outcome.traceback or ''}"
        return [
            fault for fault, kind, part in _ERRORS if kind == outcome.error_type and part in text
        ]
    if _tied_copies_drifted(outcome):
        return ["tied halves"]
    kinds = {stage.name: set(stage.kinds) for stage in outcome.stages}
    loaded, resumed = kinds.get("loaded", set()), kinds.get("resumed", set())
    found = []
    if outcome.case.model_only and ("master" in loaded or "model" in resumed):
        found.append("F12")
    if "step" in loaded:
        found.append("F3")
    elif "step" in resumed:
        found.append("F4")
    if {"master", "exp_avg"} <= loaded and outcome.case.sharding == "fully_reshardable":
        found.append("shifted")
    return found


def _tied_copies_drifted(outcome: Outcome) -> bool:
    """No fault of a checkpoint: replicas differ within one run, on halves of one optimizer."""
    case = outcome.case
    differences = [text for stage in outcome.stages for text in stage.differences]
    return (
        case.tied
        and case.layout.pp > 1
        and case.backend.optimizer == "hybrid"
        and 0 < case.backend.offload_fraction < 1
        and any(REPLICAS_DISAGREE in text for text in differences)
    )

"""Says which known fault of stock megatron-core a failure looks like."""

from __future__ import annotations

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

_TEXTS = {
    "F1": "torch Adam's 0-dim `step` lies among the bucket tensors and fails a shape check",
    "F2": "`step` went into the common state as a list of rank 0's length, no use to others",
    "F3": "the load puts the template's step back over the restored one; bias correction is wrong",
    "F4": "FusedAdam's step stays frozen at the checkpoint's",
    "F5": "the load looks native fp32 parameters up among fp32 copies that they do not have",
    "F6": "the padding marker of a bucket is handed to FusedAdam as if it were a state",
    "F7": "the int16 remainder of a master is stored as float32 and handed back as float32",
    "F8": "a fresh torch Adam has no steps yet, and the load asks for exactly one",
    "F9": "optimizer classes are in common.pt, which torch refuses to load with weights_only",
    "F16": "the default sharding type is one that no release can save any more",
    "F22": "a bucket without parameters on one rank cannot be saved",
    "F29": "the steps of capturable groups are tensors, and equal ones are not the same to a set",
    "shifted": "with several padded buckets fully_reshardable cuts parameters at padded offsets"
    " out of an unpadded tensor, so what it stores is shifted",
    "tied halves": "one stage updates its copy of the tied embedding on the host and another on the"
    " device, which round differently: the copies drift apart in the first run too"
    " (--offload-fraction 1.0 keeps them equal)",
    "F12": "the optimizer keeps its own copies of the weights and never takes the loaded ones",
}


def explain(outcome: Outcome) -> list[str]:
    """Lines such as "F9: optimizer classes are in common.pt, ..."; may be empty."""
    return [f"{fault}: {_TEXTS[fault]}" for fault in faults(outcome)]


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

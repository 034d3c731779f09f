"""The main stream waits for the copies of updated parameters.

Symptom: rare wrong weights with --overlap-cpu-optimizer-d2h-h2d (F17).
Cause: the main stream waits for the gradients' stream; parameters are copied on another one.
Changes: after each step on the host the main stream waits for that other one too.
Leaves alone: the copies themselves.
Remove when: Megatron records the event on its host-to-device stream.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from vime_optim.fixes.places import HYBRID_OPTIMIZER
from vime_optim.optimizer.kinds import sub_optimizers
from vime_optim.probe import source_of
from vime_optim.registry import NEEDED, Diagnosis, Fix, Hit, fixed_upstream, not_understood

FIX = Fix(
    id="copy-back-order",
    faults=("F17",),
    summary="the main stream waits for the copies of updated parameters",
)


def _diagnose(module: ModuleType, original: Any) -> Diagnosis:
    source = source_of(original)
    if "_h2d_stream.record_event().wait(" in source:
        return fixed_upstream("the main stream waits for the host-to-device stream")
    if "_d2h_stream.record_event().wait(" in source:
        return NEEDED
    return not_understood("no wait on a recorded event in its source")


@FIX.wraps(HYBRID_OPTIMIZER, "_register_param_copy_back_gpu_hook", _diagnose)
def _copy_back(original: Any, hit: Hit, self: Any) -> None:
    hit()
    original(self)

    def wait_for_copies(optimizer: Any, args: Any, kwargs: Any) -> None:
        # Megatron makes the main stream wait for the gradients' stream; the parameters are
        # copied on another one.
        self._h2d_stream.record_event().wait(torch.cuda.current_stream())

    for optimizer in sub_optimizers(self):
        if optimizer is not self.gpu_optimizer:
            optimizer.register_step_post_hook(wait_for_copies)

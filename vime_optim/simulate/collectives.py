"""What megatron asks of NCCL and gloo does not have."""

from __future__ import annotations

from vime_optim.simulate.patching import Patches


def apply(patches: Patches) -> None:
    """Nothing yet."""

"""Megatron on a CPU: a simulated device and a stand-in for Transformer Engine's FusedAdam.

For tests and for `vime-optim verify`; never active in training. Importing this package loads
nothing heavy: `.device` loads torch, `.megatron` loads megatron-core.
"""

from vime_optim.simulate.bootstrap import bootstrap_env

__all__ = ["bootstrap_env"]

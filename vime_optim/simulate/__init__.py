"""Megatron on a CPU: a simulated device and a stand-in for Transformer Engine's FusedAdam.

For tests and for `vime-optim verify`; never active in training. Importing this package loads
nothing; `vime_optim.simulate.device` loads torch, `vime_optim.simulate.megatron` loads megatron.
"""

"""Inner optimizers behind Megatron's DistributedOptimizer, seen through one interface.

kinds.py    which backend an optimizer is, and the parameter that a model parameter maps to
slots.py    one state (master parameter or moment) of one parameter shard: read and write it
steps.py    the step counter, wherever the backend keeps it
inert.py    state made without drawing random numbers and without moving a parameter
groups.py   a stand-in for the inner optimizer that carries param groups and no tensors
"""

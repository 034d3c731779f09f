"""Inner optimizers behind Megatron's DistributedOptimizer, seen through one interface.

kinds.py    which backend an optimizer is, and the parameter that a model parameter maps to
slots.py    one state (master parameter or moment) of one parameter shard: read and write it
steps.py    the step counter, wherever the backend keeps it
record.py   what we noted about an optimizer

A save: fresh_state and groups_only give it state and groups; update_order says what changes when.
A load: matching pairs saved groups with ours, restoring writes values, refresh sets masters from
the model where no state is loaded, soundness and stock_state check what came of it.
"""

"""The main module of a forked rank, for the processes that Megatron spawns: imports nothing."""

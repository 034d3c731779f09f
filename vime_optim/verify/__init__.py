"""`vime-optim verify`: trains, saves, loads in fresh ranks, compares every bit. Begin with runner.

What is run: case, model, train, checkpointing, training. Where: launch, server, rank, ray_launch,
job. What came of it: capture, compare, explain. transplant makes the reference of a resume in
another layout.
"""

"""The optimizer's tensors as pieces of a checkpoint: begin with engine.

layout: which ranges are this rank's. plan: the pieces. keys, complete: what ranks agree on before a
save. storage, coded, taking: how a load reads them and the optimizer takes them.
"""

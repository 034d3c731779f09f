"""Async saves by threads of the training process, from the live memory.

State changes only in an update, so a save needs no copy: what it has not read yet is copied, or
waited for, just before the update that changes it.

    units.py    a file as runs of bytes, each the unit of guard, copy and write
    stage.py    the bounded, reused host buffers for copies
    job.py      one save: threads that write, and what an update may ask of it
    guard.py    saves in flight, and every place where saved memory changes
    callers.py  Megatron's and nvidia-resiliency-ext's async callers, on top of these
    other_writers.py  writers that are not ours: their processes, under the guard

Which optimizer changes which memory, in which order, says `optimizer/update_order.py`.
"""

"""How many of the machine's cores are this process's own."""

from __future__ import annotations

import os

import torch


def own_cores() -> int:
    """This process's share of the cores that it may use: ranks of one host work at the same time.

    How many there are is told by torchrun (a rank may see one device alone), or else by the number
    of devices.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = torch.cuda.device_count() if torch.cuda.is_available() else 1
    if torch.distributed.is_initialized():
        ranks = min(ranks, torch.distributed.get_world_size())
    ranks = int(told) if told.isdigit() else ranks
    return max(1, (cores or 1) // max(1, ranks))

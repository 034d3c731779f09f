"""Functions that the launcher's tests run on ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def sum_of_ranks(payload: dict[str, Any]) -> dict[str, int]:
    import torch
    import torch.distributed as dist

    total = torch.tensor([dist.get_rank() + payload["offset"]])
    dist.all_reduce(total)
    print("hello from a rank")
    return {"rank": dist.get_rank(), "total": int(total), "world_size": dist.get_world_size()}


def raise_on_one(payload: dict[str, Any]) -> None:
    import torch.distributed as dist

    if dist.get_rank() == payload["rank"]:
        raise LookupError("this rank has lost its way")
    dist.barrier()  # never completes


def die_on_one(payload: dict[str, Any]) -> None:
    import torch.distributed as dist

    if dist.get_rank() == payload["rank"]:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def hang_with_child(payload: dict[str, Any]) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(payload["pids"], f"{os.getpid()}").touch()
    Path(payload["pids"], f"{child.pid}").touch()
    time.sleep(600)


def leave_a_mark(payload: dict[str, Any]) -> bool:
    """Whether an earlier launch's rank left something behind in this process."""
    import vime_optim.verify.case as module

    seen = hasattr(module, "mark")
    module.mark = True  # type: ignore[attr-defined]
    return seen

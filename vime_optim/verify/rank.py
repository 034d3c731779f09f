"""What one rank of a launch does: process group, the job's function, its result or its error.

Run as a program (`python -m vime_optim.verify.rank REQUEST.json RANK`) for real devices, where
nothing may be forked after CUDA has started. Light at the top, since spawn imports it again.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vime_optim.errors import VerifyError

Poll = Callable[[], "int | None"]
Ended = tuple[dict[str, int], bool]
"""The exit status by rank (as JSON has it) of those that failed, and whether the time was up."""

_POLL_S = 0.005


def import_megatron(tree: str, device: str) -> None:
    """Import torch and the given megatron-core, on the simulated device when `device` is cpu.

    Raises:
        VerifyError: another megatron-core than the given one was imported.
    """
    sys.path.insert(0, tree)
    import torch

    torch.set_num_threads(1)
    if device == "cpu":
        from vime_optim.simulate.megatron import prepare

        prepare("torch")
    import megatron.core

    found = megatron.core.__file__ or next(iter(megatron.core.__path__))
    if not Path(found).resolve().is_relative_to(Path(tree).resolve()):
        raise VerifyError(
            "another megatron-core than the asked one was imported",
            got=str(found),
            expected=f"below {tree}",
            next_step="look at PYTHONPATH and at what is installed in this environment",
        )
    for name in (
        "megatron.core.dist_checkpointing",
        "megatron.core.distributed",
        "megatron.core.models.gpt",
        "megatron.core.models.gpt.gpt_layer_specs",
        "megatron.core.optimizer",
        "megatron.core.optimizer.distrib_optimizer",
        "megatron.core.pipeline_parallel",
        # What install(), a save and a load import: once in a template, not in each of its ranks.
        "megatron.core.dist_checkpointing.strategies.fully_parallel",
        "vime_optim.fixes",
        "vime_optim.installer",
        "vime_optim.commit.sessions",
        "vime_optim.async_save.guard",
        "vime_optim.verify.job",
    ):
        importlib.import_module(name)


class WriterQueues:
    """One manager process for the queues through which Megatron's writers report.

    Megatron starts one by spawn in every rank, which costs 5 s of imports a save on two cores.
    Created in the template; each launch's ranks take queues of their own from it.
    """

    def __init__(self) -> None:
        import multiprocessing

        self._manager = multiprocessing.get_context("spawn").Manager()
        # The manager unpickles results, for which it imports torch: let it do so now.
        import torch.distributed.checkpoint.metadata as metadata

        self._manager.Queue().put(metadata.MetadataIndex("warm"))

    def provide(self) -> None:
        """In a rank: the queue that Megatron would otherwise start a manager for."""
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        if hasattr(filesystem_async, "_results_queue"):
            filesystem_async._results_queue = self._manager.Queue()


def run(request: dict[str, Any], rank: int) -> int:
    """Run the request's function in an initialized process group; 0, or 1 after an error.

    Writes `rank{N}.json` into the request's folder: {"result": ...} or {"error": ...} with the
    error's type, text, traceback and time.
    """
    out = Path(request["out"])
    try:
        _init_process_group(request, rank)
        module_name, _, function_name = request["target"].partition(":")
        function = getattr(importlib.import_module(module_name), function_name)
        answer = {"result": function(request["payload"])}
        status = 0
    except BaseException as error:
        traceback.print_exc()
        answer = {
            "error": {
                "type": type(error).__name__,
                "message": str(error),
                "traceback": traceback.format_exc(),
                "time_s": time.time(),
                "rank": rank,
            }
        }
        status = 1
    write_json(out / f"rank{rank}.json", answer)
    return status


def write_json(path: Path, value: Any) -> None:
    """Under its name when it is whole."""
    partial = path.with_suffix(".json.part")
    partial.write_text(json.dumps(value))
    partial.rename(path)


def wait(polls: Sequence[Poll], timeout_s: float, grace_s: float) -> Ended:
    """Wait for all ranks, or for the first failure and `grace_s` more, or for the time-out.

    Args:
        polls: one for each rank; its exit status, or None while it runs.
        grace_s: how long the others may still report what they saw.
    """
    deadline = time.monotonic() + timeout_s
    running = dict(enumerate(polls))
    failed: dict[str, int] = {}
    while running and time.monotonic() < deadline:
        for rank, poll in list(running.items()):
            status = poll()
            if status is not None:
                del running[rank]
            if status:
                failed[str(rank)] = status
                deadline = min(deadline, time.monotonic() + grace_s)
        if running:
            time.sleep(_POLL_S)
    return failed, bool(running) and not failed


def _init_process_group(request: dict[str, Any], rank: int) -> None:
    import torch
    import torch.distributed as dist

    world_size = request["world_size"]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    backend = "gloo"
    if request["device"] == "cuda":
        torch.cuda.set_device(rank // request.get("ranks_per_device", 1))
        backend = request.get("backend") or "cpu:gloo,cuda:nccl"
    # Not by URL: a path may hold anything.
    store = dist.FileStore(f"{request['out']}/rendezvous", world_size)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    import_megatron(request["megatron"], request["device"])
    status = run(request, int(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()

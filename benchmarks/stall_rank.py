"""What each rank of `benchmarks.stall` does: `python -m benchmarks.stall_rank OPTIONS.json RANK`.

One model and optimizer; the variants take turns on it. A turn is one async save, and after it
updates at a fixed interval until the save is finalized. Between updates runs a loop of plain
Python, whose rate says what the writers take of the interpreter. An update that waits for a save is
longer than one without.
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import throttle

VARIANTS = ("stock temporal", "stock persistent", "nvidia-resiliency-ext", "vime_optim")
OURS = VARIANTS[3]
_SLICE_S = 0.05  # between two looks whether the save is finalized
_LONGEST_S = 90.0
_SHARDING = {name: "dp_reshardable" for name in VARIANTS} | {OURS: "fully_reshardable"}

if os.environ.get(throttle.VARIABLE):  # in a spawned worker too: it imports this module
    throttle.enable()


class Turn:
    """One save of one variant to one target, and the updates after it."""

    def __init__(self, job: Any, options: dict[str, Any], meter: Any) -> None:
        from benchmarks.beside import python_loop

        self.loop_rate = python_loop
        self.job = job
        self.interval_s = float(options["interval_s"])
        self.simulated = options["device"] == "cpu"
        self.meter = meter

    def update_s(self) -> float:
        """Seconds of one update."""
        import torch

        for buffer in self.job.ddp.buffers:
            buffer.grad_data.fill_(1e-4)
        self._synchronize()
        torch.distributed.barrier()
        began = time.perf_counter()
        self.job.optimizer.step()
        self._synchronize()
        return time.perf_counter() - began

    def _synchronize(self) -> None:
        if not self.simulated:
            import torch

            torch.cuda.synchronize()

    def baseline(self) -> dict[str, float]:
        """An update and the loop without a save."""
        rates, updates = [], []
        for _ in range(3):
            rates.append(self.loop_rate(0.3))
            updates.append(self.update_s())
        return {"update_s": statistics.median(updates), "loop_rate": statistics.median(rates)}

    def measure(self, variant: str, directory: Path, queue: Any) -> dict[str, Any]:
        """Save and train until the save is finalized."""
        baseline = self.baseline()
        loop_rate = baseline["loop_rate"]
        found, phase = self.meter.phase(lambda: self._save_and_train(variant, directory, queue))
        # Before and after: other guests of a machine come and go.
        loop_rate = (loop_rate + statistics.median(self.loop_rate(0.3) for _ in range(3))) / 2
        slowdowns = [1 - rate / loop_rate for rate in found.pop("loop_rates")]
        longer_s = sum(max(0.0, s - baseline["update_s"]) for s in found["updates_s"])
        return {
            **found,
            "baseline": baseline,
            "longer_updates_s": longer_s,
            "lost_s": found["blocked_s"] + longer_s,
            "loop_slowdown": statistics.median(slowdowns),
            "loop_lost_s": sum(slowdowns) * _SLICE_S,
            "host_extra_bytes": phase.host_extra_bytes,
            "device_extra_bytes": phase.device_extra_bytes,
            "waits": _waits(),
        }

    def _save_and_train(self, variant: str, directory: Path, queue: Any) -> dict[str, Any]:
        began = time.perf_counter()
        processes = _descendants()
        queue.schedule_async_request(self.request(variant, directory))
        blocked_s = time.perf_counter() - began
        rates: list[float] = []
        updates: list[float] = []
        shared_bytes = extra_processes = 0
        finalized_s = None
        # Every rank takes the same number of slices: looking at a save is a collective.
        for _ in range(round(_LONGEST_S / self.interval_s)):
            for _ in range(round(self.interval_s / _SLICE_S)):
                rate = self.loop_rate(_SLICE_S)
                if finalized_s is not None:
                    continue
                rates.append(rate)
                shared_bytes = max(shared_bytes, _shared_bytes())
                extra_processes = max(extra_processes, _descendants() - processes)
                if queue.maybe_finalize_async_calls(blocking=False):
                    finalized_s = time.perf_counter() - began
            updates.append(self.update_s())
            if finalized_s is not None:
                break
        queue.maybe_finalize_async_calls(blocking=True)
        return {
            "blocked_s": blocked_s,
            "updates_s": updates,
            "finalized_s": finalized_s or time.perf_counter() - began,
            "loop_rates": rates,
            "shared_bytes": shared_bytes,
            "extra_processes": extra_processes,
        }

    def request(self, variant: str, directory: Path) -> Any:
        from megatron.core import dist_checkpointing, parallel_state
        from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
        from megatron.core.dist_checkpointing.strategies.fully_parallel import (
            FullyParallelSaveStrategyWrapper,
        )

        from benchmarks.state import sharded_state

        state = sharded_state(self.job, _SHARDING[variant], is_loading=False)
        strategy = FullyParallelSaveStrategyWrapper(
            get_default_save_sharded_strategy("torch_dist"),
            parallel_state.get_data_parallel_group(with_context_parallel=True),
        )
        options: dict[str, Any] = {"async_sharded_save": True}
        if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
            nvrx = variant == "nvidia-resiliency-ext"
            options["async_strategy"] = "nvrx" if nvrx else "mcore"
        options["content_metadata"] = {"distrib_optim_sharding_type": _SHARDING[variant]}
        return dist_checkpointing.save(state, str(directory), strategy, **options)


def queue_of(variant: str) -> Any:
    if variant == "nvidia-resiliency-ext":
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
    else:
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    return AsyncCallsQueue(persistent=variant in VARIANTS[1:3])


def _waits() -> dict[str, float]:
    """Seconds that updates waited, by the first tensor waited for (of the last save)."""
    from vime_optim.async_save import guard

    return dict(sorted(guard.last_waits_s.items(), key=lambda pair: -pair[1])[:10])


def _descendants() -> int:
    from benchmarks.sampler import _children

    stack, count = [os.getpid()], 0
    while stack:
        children = _children(stack.pop())
        stack += children
        count += len(children)
    return count


def _shared_bytes() -> int:
    """Bytes of /dev/shm that files of torch take."""
    total = 0
    for path in Path("/dev/shm").glob("torch_*"):
        try:
            total += path.stat().st_blocks * 512
        except OSError:
            continue
    return total


def run(options: dict[str, Any], number: int) -> None:
    """All backends, targets, rounds and variants; rank 0 writes the result after every turn."""
    import torch

    import vime_optim
    from benchmarks import state
    from benchmarks.measure import Meter
    from benchmarks.rank import choose_optimizer, gathered

    choose_optimizer(options["device"] == "cpu")
    result: dict[str, Any] = {"turns": []}
    meter = Meter(simulated=options["device"] == "cpu")
    for backend in options["backends"]:
        job = state.build(
            state.SIZES[options["size"]],
            state.BACKENDS[backend],
            simulated=options["device"] == "cpu",
        )
        turn = Turn(job, options, meter)
        for _ in range(2):
            turn.update_s()
        queues = {variant: queue_of(variant) for variant in options["variants"]}
        for number_of_round in range(-1, options["rounds"]):  # the first one is a warm-up
            for target in options["targets"]:
                for variant in options["variants"]:
                    directory = Path(target["folder"]) / "stall"
                    if number == 0:
                        shutil.rmtree(directory, ignore_errors=True)
                        directory.mkdir(parents=True)
                    torch.distributed.barrier()
                    throttle.set_rate(target.get("bytes_per_s", 0))
                    if variant == OURS:
                        vime_optim.install()
                    mine: dict[str, Any] = {}
                    try:
                        mine = turn.measure(variant, directory, queues[variant])
                    except Exception as error:
                        mine = {"error": f"{type(error).__name__}: {error}"}
                    finally:
                        vime_optim.uninstall()
                        throttle.set_rate(0)
                        gc.collect()
                    entry = {
                        "backend": backend,
                        "target": target["name"],
                        "round": number_of_round,
                        "variant": variant,
                        "ranks": gathered(mine),
                    }
                    result["turns"].append(entry)
                    if number == 0:
                        print(backend, target["name"], variant, mine.get("lost_s"), flush=True)
                        out = Path(options["out"]) / "result.json"
                        out.write_text(json.dumps(result, indent=1))
                        if options["json"]:  # what a run that is cut short has seen
                            Path(options["json"]).write_text(json.dumps(result, indent=1))
                        shutil.rmtree(directory, ignore_errors=True)
        for queue in queues.values():
            queue.close()
        del job, turn
        gc.collect()
    meter.close()


def main() -> None:
    options = json.loads(Path(sys.argv[1]).read_text())
    number = int(sys.argv[2])
    from vime_optim.verify import rank as rank_module

    rank_module.import_megatron(options["megatron"], options["device"])
    rank_module._init_process_group({"world_size": options["ranks"], **options}, number)
    import torch
    from megatron.core import parallel_state

    torch.set_num_threads(options["threads"])
    parallel_state.initialize_model_parallel()
    run(options, number)
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

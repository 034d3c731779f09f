"""What each rank of the benchmark does: `python -m benchmarks.rank OPTIONS.json RANK`.

For each configuration one model and optimizer are built; the ways of saving take turns on that one
state, each saving, loading and then being checked. vime_optim is installed for its own turns and
uninstalled after them. Rank 0 rewrites the result after every turn, so that a benchmark that is cut
short keeps what it has.
"""

from __future__ import annotations

import cProfile
import functools
import gc
import json
import os
import pstats
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VARIANTS = ("stock fully_reshardable", "stock dp_reshardable", "vime_optim")
OURS = VARIANTS[2]
#: Orders of turns: pairs in the order AB, BA, AB, so that a drift cancels out.
ORDERS = (VARIANTS, VARIANTS[::-1], VARIANTS)


class Rank:
    """One rank's side of the benchmark."""

    def __init__(self, options: dict[str, Any], number: int) -> None:
        from benchmarks.measure import Meter

        self.options = options
        self.number = number
        self.simulated = options["device"] == "cpu"
        self.folder = Path(options["folder"])
        self.meter = Meter(simulated=self.simulated)
        self.warming = False
        #: Of the last turn by backend and variant: what the next one, of any size, may take.
        self.s_per_parameter: dict[tuple[str, str], float] = {}
        self.result: dict[str, Any] = {"ranks": options["ranks"], "configurations": []}

    def run(self, fits: Callable[[float], bool]) -> None:
        from benchmarks import rawio

        options = self.options
        self.note("prefault_s", rawio.prefault(options["prefault_bytes"]))
        if options["raw_bytes"]:
            self.note(
                "raw_bytes_per_s",
                rawio.limits(self.folder, self.number, options["raw_bytes"], options["repeats"]),
            )
        self.note("copy_bytes_per_s", rawio.copies(options["copy_bytes"]))
        rawio.release_pinned()
        if options["warm_up"] == "tiny":
            # Starts writers and managers, loads libraries; big tensors do not get warmer by it.
            tiny: dict[str, dict[str, Any]] = {}
            for one in options["configurations"]:
                new = {**one, "size": "2m", "variants": []}
                tiny.setdefault(one["backend"], new)["variants"] += one["variants"]
            for one in tiny.values():
                self.configuration(one, ["warm-up"], lambda seconds: True, keep=False)
        for one in options["configurations"]:
            rounds = ["warm-up"] if options["warm_up"] == "full" else []
            rounds += [str(number) for number in range(one["rounds"])]
            if fits(0.0):
                self.configuration(one, rounds, fits, keep=True)
            else:
                left = f"{one['size']}/{one['backend']}: not begun, no time left."
                self.note("notes", [*self.result.get("notes", []), left])

    def note(self, name: str, value: Any) -> None:
        self.result[name] = value
        self.write()

    def write(self) -> None:
        if self.number == 0:
            path = Path(self.options["out"]) / "result.json"
            path.with_suffix(".part").write_text(json.dumps(self.result, indent=1))
            path.with_suffix(".part").rename(path)

    def configuration(
        self,
        asked: dict[str, Any],
        rounds: list[str],
        fits: Callable[[float], bool],
        *,
        keep: bool,
    ) -> None:
        """All turns on one model and optimizer; `asked` is a Configuration as a dict."""
        import torch

        from benchmarks import rawio, state

        choose_optimizer(self.simulated)
        began = time.perf_counter()
        size, backend = state.SIZES[asked["size"]], state.BACKENDS[asked["backend"]]
        job = state.build(size, backend, simulated=self.simulated)
        rawio.release_pinned()
        entry: dict[str, Any] = {
            "size": asked["size"],
            "backend": asked["backend"],
            "variants": list(asked["variants"]),
            "left_out": list(asked["left_out"]),
            "predicted_host_bytes": asked.get("host_bytes", {}),
            "parameters": sum(parameter.numel() for parameter in job.gpt.parameters()),
            "own_bytes": gathered(state.own_and_held_bytes(job)[0]),
            "model_bytes": sum(p.numel() * p.element_size() for p in job.gpt.parameters()),
            "build_s": time.perf_counter() - began,
            "turns": [],
        }
        if keep:
            self.result["configurations"].append(entry)
        fully_left = asked["fully_rounds"]
        for number, name in enumerate(rounds):
            self.warming = keep and name == "warm-up"
            for variant in ORDERS[number % 3]:
                if variant not in asked["variants"]:
                    continue
                if variant == VARIANTS[0]:
                    if not fully_left:
                        continue
                    fully_left -= name != "warm-up"
                expected_s = self.s_per_parameter.get((asked["backend"], variant), 0.0)
                if not fits(1.1 * expected_s * entry["parameters"]):
                    entry["left_out"].append(f"{variant}, round {name}: no time left")
                    self.write()
                    continue
                turn_began = time.monotonic()
                turn = self.turn(job, variant)
                if keep:
                    turn_s = time.monotonic() - turn_began
                    self.s_per_parameter[asked["backend"], variant] = turn_s / entry["parameters"]
                entry["turns"].append({"round": name, "variant": variant, **turn})
                self.write()
        del job
        gc.collect()
        if not self.simulated:
            torch.cuda.empty_cache()
        rawio.release_pinned()

    def turn(self, job: Any, variant: str) -> dict[str, Any]:
        """One save and one load by one variant, each phase measured on all ranks."""
        import torch

        import vime_optim
        from benchmarks.state import own_storages

        directory = self.folder / "checkpoint"
        if self.number == 0:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
        torch.distributed.barrier()
        if variant == OURS:
            vime_optim.install()
        turn: dict[str, Any] = {}
        try:
            for part, work in (("save", self.save), ("load", self.load)):
                mine, error = attempt(work, job, variant, directory)
                everyone = gathered((mine, error))
                errors = [text for _, text in everyone if text]
                if errors:
                    turn[part] = {"error": errors[0]}
                    break
                turn[part] = by_phase([phases for phases, _ in everyone])
        finally:
            vime_optim.uninstall()
            own_storages(job)
            gc.collect()
        torch.distributed.barrier()
        if self.number == 0:
            shutil.rmtree(directory, ignore_errors=True)
        return turn

    def save(self, job: Any, variant: str, directory: Path) -> dict[str, Any]:
        from megatron.core import dist_checkpointing, parallel_state
        from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
        from megatron.core.dist_checkpointing.strategies.fully_parallel import (
            FullyParallelSaveStrategyWrapper,
        )

        from benchmarks.state import sharded_state

        state, build = self.meter.phase(
            self.profiled(
                f"build {variant}",
                lambda: sharded_state(job, sharding_of(variant), is_loading=False),
            )
        )
        strategy = FullyParallelSaveStrategyWrapper(
            get_default_save_sharded_strategy("torch_dist"),
            parallel_state.get_data_parallel_group(with_context_parallel=True),
        )
        metadata = {"distrib_optim_sharding_type": sharding_of(variant)}
        _, write = self.meter.phase(
            self.profiled(
                f"write {variant}",
                lambda: dist_checkpointing.save(
                    state, str(directory), strategy, content_metadata=metadata
                ),
            )
        )
        stored = sum(path.stat().st_size for path in directory.iterdir())
        return {"build": build.to_dict(), "write": write.to_dict(), "stored_bytes": stored}

    def profiled(self, name: str, work: Callable[[], Any]) -> Callable[[], Any]:
        """With --profile, warm-up work under cProfile; the profile goes beside the logs."""
        if not (self.options["profile"] and self.warming) or self.number:
            return work

        def run() -> Any:
            profile = cProfile.Profile()
            result = profile.runcall(work)
            path = Path(self.options["out"]) / f"profile_{name.replace(' ', '_')}.txt"
            with path.open("w") as file:
                pstats.Stats(profile, stream=file).sort_stats("cumtime").print_stats(45)
            return result

        return run

    def load(self, job: Any, variant: str, directory: Path) -> dict[str, Any]:
        import torch
        from megatron.core import dist_checkpointing

        from benchmarks import state

        expected = state.checksums(job)
        state.poison(job)
        template, build = self.meter.phase(
            lambda: state.sharded_state(job, sharding_of(variant), is_loading=True)
        )
        loaded, read = self.meter.phase(
            self.profiled(
                f"read {variant}",
                functools.partial(dist_checkpointing.load, template, str(directory)),
            )
        )
        del template

        def restore() -> None:
            job.gpt.load_state_dict(loaded["model"])
            job.optimizer.load_state_dict(loaded["optimizer"])

        _, put = self.meter.phase(restore)
        loaded.clear()
        gc.collect()
        own, held = state.own_and_held_bytes(job)
        found = state.checksums(job)
        wrong = [name for name, value in expected.items() if found.get(name) != value]
        torch.distributed.barrier()
        return {
            "template": build.to_dict(),
            "read": read.to_dict(),
            "restore": put.to_dict(),
            "own_bytes": own,
            "held_bytes": held,
            "states": len(expected),
            "wrong_states": len(wrong),
            "wrong_names": wrong[:3],
        }


def sharding_of(variant: str) -> str:
    return "dp_reshardable" if variant == VARIANTS[1] else "fully_reshardable"


def attempt(work: Any, *args: Any) -> tuple[dict[str, Any] | None, str]:
    """The result, or the error as text: what stock cannot do is part of the report."""
    try:
        return work(*args), ""
    except Exception as error:
        traceback.print_exc()
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{Path(frames[-1].filename).name}:{frames[-1].name}"
        return None, f"{type(error).__name__} in {where}: {str(error)[:300]}"


def gathered(value: Any) -> list[Any]:
    """The values of all ranks."""
    import torch

    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def by_phase(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """{phase: {quantity: [value by rank]}} from one dict of phases per rank."""
    result: dict[str, Any] = {}
    for name, value in ranks[0].items():
        if isinstance(value, dict):
            result[name] = {key: [rank[name][key] for rank in ranks] for key in value}
        else:
            result[name] = [rank[name] for rank in ranks]
    return result


def choose_optimizer(simulated: bool) -> None:
    if simulated:
        from vime_optim.simulate import megatron

        megatron.prepare("te")


def allow_optimizer_classes() -> None:
    """Up to 0.18 the stock common state holds optimizer classes, which a safe load refuses.

    The exact classes are allowed here, so that stock can be timed at all.
    """
    import torch
    from megatron.core import optimizer

    classes = [torch.optim.Adam, torch.optim.AdamW, optimizer.Adam]
    for name in ("CPUAdam", "GPUAdam", "CPUAdamW"):
        classes += [getattr(optimizer, name)] if hasattr(optimizer, name) else []
    torch.serialization.add_safe_globals(list(dict.fromkeys(classes)))


@contextmanager
def start(options: dict[str, Any], number: int) -> Iterator[tuple[Rank, Callable[[float], bool]]]:
    """This process as one rank, and what says whether so many seconds still fit; then it ends."""
    from vime_optim.verify import rank as rank_module

    rank_module.import_megatron(options["megatron"], options["device"])
    request = {"world_size": options["ranks"], **options}
    rank_module._init_process_group(request, number)
    import torch
    from megatron.core import parallel_state

    from benchmarks.measure import watch_budget

    torch.set_num_threads(options["threads"])
    choose_optimizer(options["device"] == "cpu")
    allow_optimizer_classes()
    parallel_state.initialize_model_parallel()
    rank = Rank(options, number)
    with watch_budget(options["budget_s"]) as fits:
        yield rank, fits
    torch.distributed.barrier()
    rank.meter.close()
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    options = json.loads(Path(sys.argv[1]).read_text())
    with start(options, int(sys.argv[2])) as (rank, fits):
        rank.run(fits)


if __name__ == "__main__":
    main()

"""Starts ranks that run scenarios of tests/writer/scenarios.py on the simulated device.

The launched process imports torch and megatron-core once and forks the ranks. Workers that a rank
spawns import this file as their main module, which switches the simulation and injected faults on
in them too. With VIME_OPTIM_TEST_DEVICE=cuda the ranks use real devices.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

ON_CUDA = os.environ.get("VIME_OPTIM_TEST_DEVICE") == "cuda"


def prepare_here() -> None:
    """Switch the simulation and injected faults on in this process."""
    import torch  # noqa: F401  (first: the simulation's own start-up file waits for it)

    from tests.writer import faults

    if not ON_CUDA:
        from vime_optim.simulate import device
        from vime_optim.simulate.triton_stub import provide_triton

        device.enable()
        provide_triton()
    faults.enable()


if os.environ.get("VIME_OPTIM_TEST_RANKS"):
    prepare_here()


def tree_of(version: str) -> Path:
    """The unpacked megatron-core of a release."""
    from vime_optim.tools.megatron_source import resolve

    return Path(resolve(version))


def launch(
    tree: Path,
    scenario: str,
    *,
    world: int = 2,
    arguments: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    timeout_s: float = 300.0,
) -> list[dict[str, Any]]:
    """Run one scenario on `world` ranks; each rank's outcome in rank order.

    An outcome has 'result', or 'error' (type and text) and 'traceback', or 'exit' when the rank
    left none (it was killed). 'seconds' is the whole launch.

    Raises:
        TimeoutError: the launch took longer than `timeout_s`; all its processes are killed.
    """
    with (
        tempfile.TemporaryDirectory(prefix="vime_optim_launch_") as folder,
        open(Path(folder) / "log", "w+", encoding="utf-8", errors="replace") as log,
    ):
        paths = [str(ROOT), str(tree), *filter(None, [os.environ.get("VIME_OPTIM_TEST_PATH")])]
        env = {
            **{
                k: v
                for k, v in os.environ.items()
                if not k.startswith("VIME_OPTIM_") or k == "VIME_OPTIM_TEST_DEVICE"
            },
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            "VIME_OPTIM_TEST_RANKS": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "PYTHONWARNINGS": "ignore",
            **(environment or {}),
        }
        command = [sys.executable, "-m", "tests.writer.launch", folder, scenario]
        began = time.monotonic()
        process = subprocess.Popen(
            [*command, json.dumps(arguments or {})],
            env=env,
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            # Ranks and forked writers say where they are, in the log that the error shows.
            os.killpg(process.pid, signal.SIGUSR1)
            time.sleep(1)
            raise TimeoutError(f"{scenario} hung for {timeout_s} s\n{_end_of(log)}") from None
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        seconds = time.monotonic() - began
        outcomes = []
        for rank in range(world):
            path = Path(folder) / f"rank{rank}.json"
            outcome = json.loads(path.read_text()) if path.exists() else {"exit": True}
            outcomes.append({**outcome, "seconds": seconds, "log": _end_of(log)})
        return outcomes


def _end_of(log: Any) -> str:
    log.flush()
    log.seek(0)
    return str(log.read()[-15000:])


def results(outcomes: list[dict[str, Any]]) -> list[Any]:
    """The results of all ranks; an assertion error with the traceback when one has none."""
    for rank, outcome in enumerate(outcomes):
        assert "result" in outcome, (
            f"rank {rank}: {outcome.get('traceback', outcome)}\n{outcome.get('log')}"
        )
    return [outcome["result"] for outcome in outcomes]


def _run_rank(rank: int, world: int, folder: Path, scenario: str, arguments: Any) -> None:
    import torch

    from tests.writer import scenarios

    os.environ["RANK"] = str(rank)
    torch.set_num_threads(1)
    if ON_CUDA:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.distributed.init_process_group(
        "nccl" if ON_CUDA else "gloo",
        store=torch.distributed.FileStore(str(folder / "store"), world),
        rank=rank,
        world_size=world,
    )
    outcome: dict[str, Any]
    try:
        outcome = {"result": getattr(scenarios, scenario)(**arguments)}
    except BaseException as error:
        outcome = {
            "error": type(error).__name__,
            "text": str(error),
            "traceback": traceback.format_exc(),
        }
    part = folder / f"rank{rank}.part"
    part.write_text(json.dumps(outcome))
    part.rename(folder / f"rank{rank}.json")
    os._exit(0 if "result" in outcome else 1)


def main(folder: str, scenario: str, arguments: str) -> None:
    from tests.writer import scenarios

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    world = int(os.environ["VIME_OPTIM_TEST_RANKS"])
    scenarios.prepare()
    children = []
    if world == 1:  # importing megatron-core may have started CUDA, which survives no fork
        _run_rank(0, 1, Path(folder), scenario, json.loads(arguments))
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            _run_rank(rank, world, Path(folder), scenario, json.loads(arguments))
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Ranks that stay alive between launches, for real devices.

Importing torch, Transformer Engine and megatron-core takes 20 s a process there, and the first
save 8 s more, so that a matrix of cases cannot afford fresh processes. `ResidentLauncher` keeps the
contract of `vime_optim.verify.launch.Launcher`: each request builds its model and optimizer anew,
with the fixes installed and removed around it. A rank that fails alone is ended with the others,
and the next request starts new ones; one case is run in fresh processes beside these.

This file is also the program of a rank: `python resident.py OPTIONS.json RANK`.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 180.0
WORLD_SIZE = 2
#: After one rank has failed, how long the others may take to fail as well.
GRACE_S = 5.0

REHEARSE = os.environ.get("VIME_OPTIM_GPU_REHEARSE") == "1"


def missing_devices(count: int) -> str:
    """Why tests on `count` GPUs cannot run here, or nothing."""
    if REHEARSE:
        return ""
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    needed = 1 if count == WORLD_SIZE else count  # two ranks can share one
    return "" if found >= needed else f"needs {count} CUDA devices, {found} found"


def ranks_per_device() -> int:
    """Two ranks share a GPU that is alone: by gloo and host copies, as NCCL refuses them."""
    import torch

    return WORLD_SIZE if not REHEARSE and torch.cuda.device_count() == 1 else 1


def missing_apex() -> str:
    """Why NVIDIA Apex's FusedAdam cannot be used here, or nothing."""
    from importlib.util import find_spec

    from vime_optim.compat import nvidia_apex

    if not nvidia_apex():
        return "apex: it is not installed (it is on no registry, and is built from its source)"
    return "" if find_spec("amp_C") else "apex: it was built without its CUDA extensions"


def missing_fused_adam(backend: Any) -> str:
    """Why the FusedAdam of a case's backend cannot be used here, or nothing.

    Without Transformer Engine Megatron takes Apex's, which serves all but precision awareness.
    """
    from vime_optim.compat import transformer_engine_version

    if REHEARSE or backend.optimizer == "torch" or backend.torch_only:
        return ""
    if backend.apex:
        return missing_apex()
    if transformer_engine_version() is None and backend.optimizer == "fused":
        missing = "transformer-engine: it is not installed"
        return missing if backend.pao else missing_apex()
    return ""


class ResidentLauncher:
    """Two or more ranks of one megatron-core on `device` (cuda, or cpu for a rehearsal)."""

    def __init__(self, tree: Path, device: str, folder: Path, world_size: int = 2) -> None:
        self._tree = tree
        self._device = device
        self._folder = folder
        self._world_size = world_size
        self._processes: list[subprocess.Popen[str]] = []
        self._starts = 0

    def __enter__(self) -> ResidentLauncher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        target: str,
        *,
        world_size: int,
        payload: dict[str, Any],
        out: Path,
        timeout_s: float = 240.0,
    ) -> list[Any]:
        """See `Launcher.run`; `world_size` must be that of this launcher."""
        from vime_optim.verify.launch import _collect

        if world_size != self._world_size:
            raise ValueError(f"{world_size} ranks asked of a launcher with {self._world_size}")
        out.mkdir(parents=True, exist_ok=True)
        for stale in out.glob("rank*.json"):
            stale.unlink()
        self._start()
        request = json.dumps({"target": target, "payload": payload, "out": str(out)}) + "\n"
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(request)
            process.stdin.flush()
        timed_out = self._wait(out, time.monotonic() + timeout_s)
        answered = [out / f"rank{rank}.json" for rank in range(world_size)]
        failed = {
            str(rank): process.poll() or 0
            for rank, process in enumerate(self._processes)
            if process.poll() is not None
        }
        if timed_out or failed or not all(path.exists() for path in answered):
            self.close()
        return _collect(out, world_size, failed, timed_out, timeout_s)

    def close(self) -> None:
        """End the ranks and what they started."""
        from vime_optim.verify.launch import kill_session

        for process in self._processes:
            kill_session(process)
        self._processes = []

    def _start(self) -> None:
        from vime_optim.verify.launch import rank_environment

        if self._processes:
            return
        self._starts += 1
        home = self._folder / f"start{self._starts}"
        home.mkdir(parents=True)
        options = home / "options.json"
        options.write_text(
            json.dumps(
                {
                    "megatron": str(self._tree),
                    "device": self._device,
                    "out": str(home),
                    "world_size": self._world_size,
                    "ranks_per_device": ranks_per_device(),
                    "backend": "gloo" if ranks_per_device() > 1 else None,
                }
            )
        )
        environment = rank_environment(self._tree, self._device)
        # Compiled helpers would be compiled anew in every process, and change no result here.
        environment.update(TORCHDYNAMO_DISABLE="1", CUBLAS_WORKSPACE_CONFIG=":4096:8")
        for rank in range(self._world_size):
            with (home / f"rank{rank}.log").open("w") as log:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, __file__, str(options), str(rank)],
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=log,
                        env=environment,
                        start_new_session=True,
                        text=True,
                    )
                )

    def _wait(self, out: Path, deadline: float) -> bool:
        """Until every rank has answered, or one has failed and GRACE_S is over; True: too late."""
        missing = set(range(self._world_size))
        while missing:
            for rank in list(missing):
                path = out / f"rank{rank}.json"
                ended = self._processes[rank].poll() is not None
                if path.exists() or ended:
                    missing.discard(rank)
                    if ended or "error" in json.loads(path.read_text()):
                        deadline = min(deadline, time.monotonic() + GRACE_S)
            if time.monotonic() > deadline:
                return bool(missing) and not any(
                    "error" in json.loads(path.read_text()) for path in out.glob("rank*.json")
                )
            time.sleep(0.02)
        return False


class ResidentPool:
    """One launcher at a time, since every rank holds a GPU context."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._release = ""
        self._launcher: ResidentLauncher | None = None

    def get(self, release: str) -> ResidentLauncher:
        from vime_optim.tools.megatron_source import resolve

        if self._launcher is None or release != self._release:
            self.close()
            device = "cpu" if REHEARSE else "cuda"
            self._launcher = ResidentLauncher(resolve(release), device, self._folder / release)
            self._release = release
        return self._launcher

    def close(self) -> None:
        if self._launcher is not None:
            self._launcher.close()
        self._launcher = None


def main() -> None:
    """One rank: requests as JSON lines on standard input, answers as files."""
    options = json.loads(Path(sys.argv[1]).read_text())
    rank = int(sys.argv[2])
    sys.path.insert(0, str(ROOT))
    from vime_optim.verify import rank as rank_module

    rank_module.import_megatron(options["megatron"], options["device"])
    if options["ranks_per_device"] > 1:
        from benchmarks.staging import stage_collectives

        stage_collectives()
    rank_module._init_process_group(options, rank)
    keep_model_parallel_groups()
    for line in sys.stdin:
        answer(json.loads(line), rank, options["device"])
    os._exit(0)


def answer(request: dict[str, Any], rank: int, device: str) -> None:
    """Run one request, clean up after it, write the result."""
    import importlib

    module_name, _, name = request["target"].partition(":")
    try:
        choose_adam(request["payload"], name, device)
        result = getattr(importlib.import_module(module_name), name)(request["payload"])
        reply = {"result": result}
    except BaseException as error:
        traceback.print_exc()
        reply = {
            "error": {
                "type": type(error).__name__,
                "message": str(error),
                "traceback": traceback.format_exc(),
                "time_s": time.time(),
                "rank": rank,
            }
        }
    clean_up()
    out = Path(request["out"])
    partial = out / f"rank{rank}.json.part"
    partial.write_text(json.dumps(reply))
    partial.rename(out / f"rank{rank}.json")
    sys.stdout.flush()
    sys.stderr.flush()


def clean_up() -> None:
    import torch

    import vime_optim

    vime_optim.uninstall()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def keep_model_parallel_groups() -> None:
    """Build Megatron's process groups once for each set of sizes: new NCCL ones take seconds."""
    from megatron.core import parallel_state

    initialize = parallel_state.initialize_model_parallel
    current: list[Any] = []

    def initialize_once(**sizes: Any) -> None:
        if current == [sizes]:
            return
        if current:
            parallel_state.destroy_model_parallel()
        current[:] = [sizes]
        initialize(**sizes)

    parallel_state.initialize_model_parallel = initialize_once


def choose_adam(payload: dict[str, Any], phase: str, device: str) -> None:
    """Which Adam Megatron uses follows from what is installed; make it that of the case."""
    if device == "cpu":
        return  # the simulation chooses by itself
    from vime_optim.simulate import megatron

    core = megatron._import_megatron()
    if not _REAL:
        for place, names in _NAMES.items():
            _REAL[place] = {n: getattr(core[place], n) for n in names if hasattr(core[place], n)}
    side = "load_backend" if phase in ("resume", "reference") else "backend"
    backend = payload["case"][side]
    if backend["optimizer"] == "torch" or backend["torch_only"]:
        megatron._use_torch(core)
        _make_adam_run_as(core, payload.get("adam"))
        return
    for place, values in _REAL.items():
        for name, value in values.items():
            setattr(core[place], name, value)
    if backend["apex"]:
        from apex.optimizers import FusedAdam

        # Also where Transformer Engine is there, which Megatron would take first.
        megatron._set_adam(core, FusedAdam, "APEX")


def _make_adam_run_as(core: dict[str, Any], implementation: str | None) -> None:
    """Have torch's AdamW run as "fused", "foreach" or "scalar" instead of as it would choose."""
    if implementation is None:
        return
    import torch

    wanted = {"scalar": {"foreach": False}}.get(str(implementation), {str(implementation): True})

    class AdamW(torch.optim.AdamW):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs, **wanted)

    for place in _NAMES:
        if hasattr(core[place], "Adam"):
            core[place].Adam = AdamW


_REAL: dict[str, dict[str, Any]] = {}
_NAMES = {
    "optimizer": ("Adam", "USING_PYTORCH_OPTIMIZER", "is_te_min_version"),
    "distrib": (
        "Adam",
        "HAVE_APEX_OR_TE",
        "USING_TE_OPTIMIZER",
        "USING_APEX_OPTIMIZER",
        "is_te_min_version",
    ),
    "config": ("is_te_min_version",),
}


if __name__ == "__main__":
    main()

"""Starts the ranks of verify jobs and collects their results.

    with open_launcher("0.16.1") as launcher:
        launcher.run("vime_optim.verify.job:save", world_size=2, payload={...}, out=folder)

On the simulated device one template process imports torch and megatron-core (6 to 10 s) and forks
the ranks of every launch (server.py). On real devices each rank is a process of its own. Ray starts
them as actors (ray_launch.py). What a rank does is in rank.py.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from vime_optim.errors import VerifyError
from vime_optim.simulate import bootstrap_env
from vime_optim.tools.megatron_source import resolve
from vime_optim.verify.rank import Ended, wait

START_TIMEOUT_S = 300.0
LAUNCH_TIMEOUT_S = 240.0

_Self = TypeVar("_Self")


class RankFailure(VerifyError):
    """One rank of a launch failed; the others were ended. `error_type` is the exception's name."""

    def __init__(self, rank: int, error_type: str, message: str, trace: str, log: Path) -> None:
        self.error_type = error_type
        self.message = message
        self.traceback = trace
        frames = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
        super().__init__(
            f"{error_type}: {next(iter(message.splitlines()), '')}",
            where=frames[-1] if frames else None,
            next_step=f"the rank's output is in {log}",
            rank=rank,
        )


class TemplateError(VerifyError):
    """The template process could not start, or ended: no further launch is possible."""


class Launcher:
    """Runs one function on every rank of a launch. `device`: cuda, or cpu, which simulates one."""

    def __init__(self, tree: Path, device: str = "cpu") -> None:
        self._tree = tree
        self._device = device

    def run(
        self,
        target: str,
        *,
        world_size: int,
        payload: dict[str, Any],
        out: Path,
        timeout_s: float = LAUNCH_TIMEOUT_S,
    ) -> list[Any]:
        """The function's results by rank.

        Args:
            target: "module:function"; the function takes `payload` and returns plain data.
            out: an empty or missing folder for this launch's logs and results.

        Raises:
            RankFailure: the first rank that failed.
            VerifyError: the launch took longer than `timeout_s`.
        """
        out.mkdir(parents=True, exist_ok=True)
        for stale in (*out.glob("rank*.json"), out / "rendezvous"):
            stale.unlink(missing_ok=True)
        request = {
            "target": target,
            "world_size": world_size,
            "payload": payload,
            "out": str(out.absolute()),
            "timeout_s": timeout_s,
            "device": self._device,
            "megatron": str(self._tree),
        }
        failed, timed_out = self._launch(request)
        return _collect(out, world_size, failed, timed_out, timeout_s)

    def _launch(self, request: dict[str, Any]) -> Ended:
        """Run the request on its ranks, and leave none of them behind."""
        raise NotImplementedError

    def close(self) -> None:
        """End every process that this launcher started."""

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_launcher(megatron: str | Path, device: str = "cpu") -> Launcher:
    """A launcher for one megatron-core (a path, or a release) on the simulated or a real device."""
    tree = resolve(megatron)
    return ForkLauncher(tree) if device == "cpu" else ProcessLauncher(tree, device)


class ForkLauncher(Launcher):
    """Launches on the simulated device: ranks are forks of one template process."""

    def __init__(self, tree: Path) -> None:
        super().__init__(tree)
        self._home = Path(tempfile.mkdtemp(prefix="vime-verify-"))
        self.log = self._home / "template.log"
        self._socket, theirs = socket.socketpair()
        self._lines = self._socket.makefile("rw")
        with theirs:
            self._process = start(
                "server",
                [str(tree), str(theirs.fileno())],
                self.log,
                rank_environment(tree, "cpu"),
                pass_fds=(theirs.fileno(),),
            )
        self._is_ready = False

    def _launch(self, request: dict[str, Any]) -> Ended:
        if not self._is_ready:
            answer = self._answer(START_TIMEOUT_S)
            if "error" in answer:
                raise TemplateError(
                    "megatron-core could not be imported",
                    where=str(self._tree),
                    got=answer["error"].strip().splitlines()[-1],
                    next_step="the traceback:\n" + answer["error"],
                )
            self._is_ready = True
        try:
            self._lines.write(json.dumps(request) + "\n")
            self._lines.flush()
        except OSError:
            raise self._died() from None
        answer = self._answer(request["timeout_s"] + 30.0)
        return answer["failed"], answer["timed_out"]

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        self._socket.settimeout(timeout_s)
        try:
            line = self._lines.readline()
        except TimeoutError:
            raise TemplateError(
                "the template process does not answer", got=f"nothing for {timeout_s:.0f} s"
            ) from None
        except OSError:
            line = ""
        if not line:
            raise self._died()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _died(self) -> TemplateError:
        tail = self.log.read_text(errors="replace")[-2000:] if self.log.exists() else ""
        return TemplateError("the template process ended by itself", got=tail.strip() or None)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)  # the template's input ends, and so does it
        try:
            self._process.wait(timeout=10.0)
        except subprocess.TimeoutExpired:
            pass
        kill_session(self._process)
        self._socket.close()
        shutil.rmtree(self._home, ignore_errors=True)


class ProcessLauncher(Launcher):
    """Launches on real devices: one process a rank, nothing forked after CUDA has started.

    `backend`: of torch's process group, else gloo on the host and NCCL on devices.
    `ranks_per_device`: more than one share a device, which NCCL refuses.
    """

    def __init__(
        self, tree: Path, device: str, *, backend: str | None = None, ranks_per_device: int = 1
    ) -> None:
        super().__init__(tree, device)
        self._options = {"backend": backend, "ranks_per_device": ranks_per_device}

    def _launch(self, request: dict[str, Any]) -> Ended:
        out = Path(request["out"])
        (out / "request.json").write_text(json.dumps({**request, **self._options}))
        environment = rank_environment(self._tree, self._device)
        processes = [
            start("rank", [f"{out}/request.json", str(rank)], out / f"rank{rank}.log", environment)
            for rank in range(request["world_size"])
        ]
        try:
            return wait([process.poll for process in processes], request["timeout_s"], grace_s=2.0)
        finally:
            for process in processes:
                kill_session(process)


def start(
    module: str,
    arguments: Sequence[str],
    log: Path,
    environment: dict[str, str],
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Run a module of vime_optim.verify as a program in a session of its own."""
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", f"vime_optim.verify.{module}", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=environment,
            pass_fds=pass_fds,
            start_new_session=True,
        )


def rank_environment(tree: Path, device: str) -> dict[str, str]:
    """The environment of every rank: the asked megatron-core first, one thread, loopback only."""
    package_root = str(Path(__file__).resolve().parents[2])
    environment = dict(os.environ)
    paths = [str(tree), package_root, environment.get("PYTHONPATH", "")]
    environment.update(
        PYTHONPATH=os.pathsep.join(filter(None, paths)),
        OMP_NUM_THREADS="1",
        PYTHONFAULTHANDLER="1",
        CUDA_DEVICE_MAX_CONNECTIONS="1",
    )
    if device == "cpu":
        environment.update(GLOO_SOCKET_IFNAME="lo", TORCHDYNAMO_DISABLE="1")
        environment = bootstrap_env(environment)
    return environment


def _collect(
    out: Path, world_size: int, failed: dict[str, int], timed_out: bool, timeout_s: float
) -> list[Any]:
    paths = {rank: out / f"rank{rank}.json" for rank in range(world_size)}
    answers = {r: json.loads(path.read_text()) for r, path in paths.items() if path.exists()}
    errors = [answer["error"] for answer in answers.values() if "error" in answer]
    if errors:
        first = min(errors, key=lambda error: error["time_s"])
        log = out / f"rank{first['rank']}.log"
        raise RankFailure(first["rank"], first["type"], first["message"], first["traceback"], log)
    if timed_out:
        late = [rank for rank in range(world_size) if rank not in answers]
        raise VerifyError(
            f"a launch took longer than {timeout_s:g} s and was ended",
            where=f"ranks {late}",
            next_step=f"the output of the ranks is in {out}",
        )
    for rank, code in failed.items():
        text = f"the process died with {'signal' if code < 0 else 'exit status'} {abs(code)}"
        raise RankFailure(int(rank), "ProcessDied", text, "", out / f"rank{rank}.log")
    return [answers[rank]["result"] for rank in range(world_size)]


def kill_session(process: subprocess.Popen[Any]) -> None:
    """End the process and what it started in its session, such as managers."""
    try:
        os.killpg(process.pid, 9)
    except (ProcessLookupError, PermissionError):
        pass
    process.wait()

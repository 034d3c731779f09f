"""Starts the ranks of verify jobs and collects their results.

    with open_launcher("0.16.1") as launcher:
        launcher.run("vime_optim.verify.job:save", world_size=2, payload={...}, out=folder)

On the simulated device one template process imports torch and megatron-core (6 to 10 s) and forks
the ranks of every launch (server.py). On real devices each rank is a process of its own.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

from vime_optim.errors import VerifyError
from vime_optim.simulate import bootstrap_env
from vime_optim.tools.megatron_source import resolve

START_TIMEOUT_S = 300.0
LAUNCH_TIMEOUT_S = 240.0


class RankFailure(VerifyError):
    """One rank of a launch failed; the others were ended. `error_type` is the exception's name."""

    def __init__(
        self, rank: int, error_type: str, message: str, trace: str, log: Path | None
    ) -> None:
        self.error_type = error_type
        self.message = message
        self.traceback = trace
        first_line = next(iter(message.splitlines()), "")
        super().__init__(
            f"{error_type}: {first_line}",
            where=_last_frame(trace),
            next_step=None if log is None else f"the rank's output is in {log}",
            rank=rank,
        )


class TemplateError(VerifyError):
    """The template process could not start, or ended: no further launch is possible."""


class Launcher(Protocol):
    """Runs one function on every rank of a launch."""

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

    def close(self) -> None:
        """End every process that this launcher started."""

    def __enter__(self) -> Launcher: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def open_launcher(megatron: str | Path, device: str = "cpu") -> Launcher:
    """A launcher for one megatron-core (a path, or a release) on the simulated or a real device."""
    tree = resolve(megatron)
    return ForkLauncher(tree) if device == "cpu" else ProcessLauncher(tree, device)


_Self = TypeVar("_Self")


class Closing:
    """What every launcher does as a context manager."""

    def __enter__(self: _Self) -> _Self:
        return self

    def close(self) -> None:
        raise NotImplementedError

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class ForkLauncher(Closing):
    """Launches on the simulated device: ranks are forks of one template process."""

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        self._home = Path(tempfile.mkdtemp(prefix="vime-verify-"))
        self.log = self._home / "template.log"
        read_fd, write_fd = os.pipe()
        options = {"megatron": str(tree), "device": "cpu", "answer_fd": write_fd}
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vime_optim.verify.server", json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(write_fd,),
                start_new_session=True,
                env=rank_environment(tree, "cpu"),
                text=True,
            )
        os.close(write_fd)
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read_answers, args=(read_fd,), daemon=True).start()
        self._ready = False

    def run(
        self,
        target: str,
        *,
        world_size: int,
        payload: dict[str, Any],
        out: Path,
        timeout_s: float = LAUNCH_TIMEOUT_S,
    ) -> list[Any]:
        self._wait_ready()
        request = _request(target, world_size, payload, out, timeout_s, "cpu", self._tree)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        answer = self._next_answer(timeout_s + 30.0)
        return _collect(out, world_size, answer["failed"], answer["timed_out"], timeout_s)

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10.0)
        except subprocess.TimeoutExpired:
            pass
        kill_session(self._process)
        shutil.rmtree(self._home, ignore_errors=True)

    def _wait_ready(self) -> None:
        if self._ready:
            return
        answer = self._next_answer(START_TIMEOUT_S)
        if "error" in answer:
            raise TemplateError(
                "megatron-core could not be imported",
                where=str(self._tree),
                got=answer["error"].strip().splitlines()[-1],
                next_step="the traceback:\n" + answer["error"],
            )
        self._ready = True

    def _read_answers(self, read_fd: int) -> None:
        with os.fdopen(read_fd) as answers:
            for line in answers:
                self._answers.put(line)
        self._answers.put("")

    def _next_answer(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise TemplateError(
                "the template process does not answer", got=f"nothing for {timeout_s:.0f} s"
            ) from None
        if not line:
            raise self._died()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _died(self) -> TemplateError:
        tail = self.log.read_text(errors="replace")[-2000:] if self.log.exists() else ""
        return TemplateError("the template process ended by itself", got=tail.strip() or None)


class ProcessLauncher(Closing):
    """Launches on real devices: one process a rank, nothing forked after CUDA has started.

    `backend`: of torch's process group, else gloo on the host and NCCL on devices.
    `ranks_per_device`: more than one share a device, which NCCL refuses.
    """

    def __init__(
        self, tree: Path, device: str, *, backend: str | None = None, ranks_per_device: int = 1
    ) -> None:
        self._tree = tree
        self._device = device
        self._options = {"backend": backend, "ranks_per_device": ranks_per_device}

    def run(
        self,
        target: str,
        *,
        world_size: int,
        payload: dict[str, Any],
        out: Path,
        timeout_s: float = LAUNCH_TIMEOUT_S,
    ) -> list[Any]:
        request = _request(target, world_size, payload, out, timeout_s, self._device, self._tree)
        request.update(self._options)
        (out / "request.json").write_text(json.dumps(request))
        environment = rank_environment(self._tree, self._device)
        processes = [self._start(out, rank, environment) for rank in range(world_size)]
        try:
            failed, timed_out = _wait_processes(processes, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                kill_session(process)
        return _collect(out, world_size, failed, timed_out, timeout_s)

    def _start(self, out: Path, rank: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        with (out / f"rank{rank}.log").open("wb") as log:
            return subprocess.Popen(
                [
                    *(sys.executable, "-m", "vime_optim.verify.rank"),
                    *(str(out / "request.json"), str(rank)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def close(self) -> None:
        """Nothing is left between launches."""


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


def _request(
    target: str,
    world_size: int,
    payload: dict[str, Any],
    out: Path,
    timeout_s: float,
    device: str,
    tree: Path,
) -> dict[str, Any]:
    out.mkdir(parents=True, exist_ok=True)
    for stale in (*out.glob("rank*.json"), out / "rendezvous"):
        stale.unlink(missing_ok=True)
    return {
        "target": target,
        "world_size": world_size,
        "payload": payload,
        "out": str(out.absolute()),
        "timeout_s": timeout_s,
        "device": device,
        "megatron": str(tree),
    }


def _collect(
    out: Path, world_size: int, failed: dict[str, int], timed_out: bool, timeout_s: float
) -> list[Any]:
    answers: dict[int, dict[str, Any]] = {}
    for rank in range(world_size):
        path = out / f"rank{rank}.json"
        if path.exists():
            answers[rank] = json.loads(path.read_text())
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
    for rank_text, code in failed.items():
        text = f"the process died with {'signal' if code < 0 else 'exit status'} {abs(code)}"
        raise RankFailure(int(rank_text), "ProcessDied", text, "", out / f"rank{rank_text}.log")
    return [answers[rank]["result"] for rank in range(world_size)]


def _wait_processes(
    processes: list[subprocess.Popen[bytes]], deadline: float
) -> tuple[dict[str, int], bool]:
    failed: dict[str, int] = {}
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code and str(rank) not in failed:
                failed[str(rank)] = code
                deadline = min(deadline, time.monotonic() + 2.0)
        if all(code is not None for code in codes):
            return failed, False
        if time.monotonic() > deadline:
            return failed, not failed
        time.sleep(0.05)


def kill_session(process: subprocess.Popen[Any]) -> None:
    """End the process and what it started in its session, such as managers."""
    try:
        os.killpg(process.pid, 9)
    except (ProcessLookupError, PermissionError):
        pass
    process.wait()


def _last_frame(trace: str) -> str | None:
    frames = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    return frames[-1] if frames else None

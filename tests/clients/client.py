"""Runs a case on a tree: train without a break, resume in fresh ranks, compare every bit.

    full    trains 6 iterations and saves after 3 and 6
    resume  fresh ranks load the checkpoint of iteration 3 and train to 6

Iterations 4 to 6 must be equal in losses, gradient norm, learning rates, parameters, masters,
moments and steps. To run cases by hand::

    PYTHONPATH=tests .venv/bin/python -m clients TREE CASE [CASE ...]
"""

from __future__ import annotations

import json
import math
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clients.cases import SAVED_AT, TINY, Case, arguments_of
from clients.trees import ROOT
from vime_optim.verify.launch import rank_environment

WORLD_SIZE = 2
RUN_TIMEOUT_S = 240.0
START_TIMEOUT_S = 300.0
#: Values of one step that must be equal.
COMPARED = ("loss", "grad_norm", "lr", "parameters", "optimizer")


class RunFailed(AssertionError):
    """A rank of a run failed; the text holds the error and the end of its output."""


@dataclass(frozen=True)
class Home:
    """What a template imports: ranks of one template differ in nothing of this."""

    tree: Path
    nvrx: Path | None = None
    """The folder that holds nvidia_resiliency_ext; without one it cannot be imported."""
    install_first: bool = False


class Template:
    """A template process (template.py) of one home."""

    def __init__(self, home: Home, folder: Path) -> None:
        self.home = home
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "template.log"
        read_fd, write_fd = os.pipe()
        options = {
            "tree": str(home.tree),
            "install_first": home.install_first,
            "answer_fd": write_fd,
        }
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "clients.template", json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(write_fd,),
                start_new_session=True,
                env=_environment(home),
                text=True,
            )
        os.close(write_fd)
        self._answers = os.fdopen(read_fd)
        self._ready = False

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        if not self._ready:
            ready = self._answer(START_TIMEOUT_S)
            if "error" in ready:
                raise RuntimeError(f"the tree cannot be imported:\n{ready['error']}")
            self._ready = True
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer(request["timeout_s"] + 60.0)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        watch = threading.Timer(timeout_s, self._process.kill)
        watch.start()
        try:
            line = self._answers.readline()
        finally:
            watch.cancel()
        if not line:
            tail = self.log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"the template ended or did not answer in {timeout_s} s:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()


def _environment(home: Home) -> dict[str, str]:
    environment = rank_environment(home.tree, "cpu")
    paths = [
        *environment["PYTHONPATH"].split(os.pathsep),
        str(ROOT / "tests" / "clients" / "startup"),
        str(ROOT / "tests"),
    ]
    if home.nvrx is not None:
        paths.insert(0, str(home.nvrx))
    else:
        environment["CLIENTS_WITHOUT_NVRX"] = "1"
    environment.update(
        PYTHONPATH=os.pathsep.join(paths), PYTHONUNBUFFERED="1", TOKENIZERS_PARALLELISM="false"
    )
    for name in [name for name in environment if name.startswith("VIME_OPTIM_")]:
        if name != "VIME_OPTIM_SIMULATE":
            del environment[name]
    return environment


Records = list[dict[str, Any]]


def run_case(template: Template, case: Case, *, install: str | None = None) -> list[str]:
    """The differences between the resumed and the uninterrupted run, as text; none is right.

    Raises:
        RunFailed: a rank ended with an error.
    """
    out = Path(tempfile.mkdtemp(prefix=f"{case.name}.", dir=template.folder))
    full = _launch(template, case, "full", out, install)
    tracker = out / "saved" / "latest_checkpointed_iteration.txt"
    if tracker.exists():
        tracker.write_text(str(SAVED_AT))
    resumed = _launch(template, case, "resume", out, install)
    _check_library(install or case.install, full + resumed)
    if case.judge == "kept":
        return _changed(full, resumed)
    return differences(full, resumed, case.first_compared)


def _launch(template: Template, case: Case, phase: str, out: Path, install: str | None) -> Records:
    arguments = [*TINY, "--data-cache-path", str(template.folder / "cache")]
    arguments += arguments_of(case, phase, out, template.home.tree)
    request = {
        "tree": str(template.home.tree),
        "out": str(out),
        "phase": phase,
        "world_size": case.world_size,
        "port": free_port(),
        "arguments": arguments,
        "install": install or case.install,
        "adam": case.adam,
        "real_main": case.real_main,
        "callers": case.callers if phase == "resume" else case.callers_of_full,
        "timeout_s": RUN_TIMEOUT_S,
    }
    status = template.run(request)["status"]
    for rank in sorted(range(case.world_size), key=lambda rank: _end_s(out, phase, rank)):
        read(out, phase, rank, status[str(rank)])  # the first to fail is the one to blame
    return [read(out, phase, rank, status[str(rank)]) for rank in range(case.world_size)]


def _record(out: Path, phase: str, rank: int) -> dict[str, Any]:
    path = out / f"{phase}.rank{rank}.json"
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return record


def _end_s(out: Path, phase: str, rank: int) -> float:
    return float(_record(out, phase, rank).get("time_s", math.inf))


def read(out: Path, phase: str, rank: int, status: int) -> dict[str, Any]:
    record = _record(out, phase, rank)
    error = record.get("error") or (f"exit status {status}" if status or not record else None)
    if error:
        log = out / f"{phase}.rank{rank}.log"
        tail = log.read_text(errors="replace")[-4000:] if log.exists() else "no output"
        raise RunFailed(f"{phase}, rank {rank}: {error}\n{log}\n{tail}")
    return record


def _check_library(install: str, records: Records) -> None:
    for record in records:
        assert record["installed"] == (install != "no")
        assert record["not_understood"] == [], "targets that are not understood on this tree"


def differences(full: Records, resumed: Records, first: int) -> list[str]:
    found = []
    for rank, (expected, got) in enumerate(zip(full, resumed, strict=True)):
        steps = sorted(set(expected["steps"]) | set(got["steps"]), key=int)
        began = min(map(int, got["steps"]), default=None)
        if began != first:
            found.append(f"rank {rank}: the resumed run began with step {began}, expected {first}")
        steps = [step for step in steps if int(step) >= first]
        for step in steps:
            if step not in expected["steps"] or step not in got["steps"]:
                found.append(f"rank {rank} step {step}: in one of the two runs alone")
                continue
            a, b = expected["steps"][step], got["steps"][step]
            found += [
                f"rank {rank} step {step} {name}: {_difference(a[name], b[name])}"
                for name in COMPARED
                if a[name] != b[name]
            ]
    return found


def _difference(expected: Any, got: Any) -> str:
    if not isinstance(expected, dict) or not isinstance(got, dict):
        return f"{got}, expected {expected}"
    other = [name for name in {**expected, **got} if expected.get(name) != got.get(name)]
    return f"{len(other)} of {len(expected)}, first {other[0]}"


def _changed(full: Records, resumed: Records) -> list[str]:
    """Steps that change no bit must leave the parameters as they were saved; new ones may be."""
    found = []
    for rank, (saved, got) in enumerate(zip(full, resumed, strict=True)):
        expected = saved["steps"][str(SAVED_AT)]["parameters"]
        if not got["steps"]:
            found.append(f"rank {rank}: nothing was trained after the load")
        found += [
            f"rank {rank} step {step} {name}: {values['parameters'].get(name)}, saved {digest}"
            for step, values in got["steps"].items()
            for name, digest in expected.items()
            if values["parameters"].get(name) != digest
        ]
    return found


def free_port() -> int:
    """A port below those that the system gives to clients, which others may take meanwhile."""
    while True:
        port = random.randrange(15000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port

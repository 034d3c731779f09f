"""The template process: imports one megatron-core once, then forks the ranks of each launch.

Every launch starts from this untouched template, which has built nothing, so its ranks are as fresh
as new processes, at a tenth of the cost. Requests and answers are JSON lines on the socket that is
named on the command line; the template ends with it.

Only the standard library is imported at the top: Megatron starts managers by spawn, and spawn
imports this file again.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from vime_optim.verify import rank as rank_module
from vime_optim.verify.rank import Ended, Poll


def main() -> None:
    tree, number = sys.argv[1], int(sys.argv[2])
    os.set_inheritable(number, False)
    lines = socket.socket(fileno=number).makefile("rw")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the manager is ended too
    _die_with_parent(signal.SIGTERM)
    try:
        rank_module.import_megatron(tree, "cpu")
        queues = rank_module.WriterQueues()
    except BaseException:
        _answer(lines, {"error": traceback.format_exc()})
        raise SystemExit(1) from None
    _answer(lines, {"ready": True})
    while line := lines.readline():
        failed, timed_out = launch(json.loads(line), queues.provide)
        _answer(lines, {"failed": failed, "timed_out": timed_out})


def _answer(lines: TextIO, answer: dict[str, Any]) -> None:
    lines.write(json.dumps(answer) + "\n")
    lines.flush()


def launch(request: dict[str, Any], prepare: Callable[[], None]) -> Ended:
    """Fork the ranks of one launch and wait for them; kills all of them when one fails.

    Args:
        request: see launch.py; `out` is a folder of this launch's own.
        prepare: called in every rank first.
    """
    pids: list[int] = []
    for rank in range(request["world_size"]):
        pid = os.fork()
        group = pids[0] if pids else pid
        if pid == 0:
            os.setpgid(0, group)
            _child(request, rank, prepare)
        try:
            os.setpgid(pid, group)
        except OSError:
            pass  # the child did it first, or has ended already
        pids.append(pid)
    try:
        return rank_module.wait([_poll(pid) for pid in pids], request["timeout_s"], grace_s=0.5)
    finally:
        _kill_group(pids)


def _poll(pid: int) -> Poll:
    def poll() -> int | None:
        done, status = os.waitpid(pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if done else None

    return poll


def _child(request: dict[str, Any], rank: int, prepare: Callable[[], None]) -> None:
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _die_with_parent(signal.SIGKILL)
        log = os.open(f"{request['out']}/rank{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        prepare()
        status = rank_module.run(request, rank)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _kill_group(pids: list[int]) -> None:
    """End what is left of the launch: ranks, and managers or writers that they started."""
    try:
        os.killpg(pids[0], signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    for pid in pids:
        try:
            os.waitpid(pid, 0)
        except ChildProcessError:
            pass


def _die_with_parent(number: signal.Signals) -> None:
    """Linux: get this signal when the parent dies, so that no process is left behind."""
    if Path("/proc/self").exists():
        import ctypes

        ctypes.CDLL(None).prctl(1, int(number))  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    main()

"""The template process: imports one megatron-core once, then forks the ranks of each launch.

Every launch starts from this untouched template, which has built nothing, so its ranks are as fresh
as new processes, at a tenth of the cost. Requests come as JSON lines on standard input, answers go
as JSON lines to the file descriptor named on the command line; the template ends with its input.

Only the standard library is imported at the top: Megatron starts managers by spawn, and spawn
imports this file again.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

POLL_S = 0.005
#: After one rank has failed, how long the others may still report what they saw.
GRACE_S = 0.5


def main() -> None:
    options = json.loads(sys.argv[1])
    answers = os.fdopen(options["answer_fd"], "w", buffering=1)
    os.set_inheritable(options["answer_fd"], False)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the manager is ended too
    _die_with_parent(signal.SIGTERM)
    try:
        from vime_optim.verify import rank

        rank.import_megatron(options["megatron"], options["device"])
        queues = rank.WriterQueues()
    except BaseException:
        answers.write(json.dumps({"error": traceback.format_exc()}) + "\n")
        raise SystemExit(1) from None
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(launch(json.loads(line), queues.provide)) + "\n")


def launch(request: dict[str, Any], prepare: Callable[[], None]) -> dict[str, Any]:
    """Fork the ranks of one launch and wait for them; kills all of them when one fails.

    Args:
        request: `target` ("module:function"), `payload`, `world_size`, `out` (a folder of this
            launch's own) and `timeout_s`.
        prepare: called in every rank first.

    Returns:
        `failed`: the exit status by rank of those that failed; `timed_out`.
    """
    pids: dict[int, int] = {}
    group = 0
    for rank in range(request["world_size"]):
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, group)
            _child(request, rank, prepare)
        group = group or pid
        try:
            os.setpgid(pid, group)
        except OSError:
            pass  # the child did it first, or has ended already
        pids[pid] = rank
    try:
        failed, timed_out = _wait(pids, time.monotonic() + request["timeout_s"])
    finally:
        _kill_group(group, pids)
    return {"failed": failed, "timed_out": timed_out}


def _child(request: dict[str, Any], rank: int, prepare: Callable[[], None]) -> None:
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _die_with_parent(signal.SIGKILL)
        log = os.open(f"{request['out']}/rank{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        from vime_optim.verify import rank as rank_module

        prepare()
        status = rank_module.run(request, rank)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait(pids: dict[int, int], deadline: float) -> tuple[dict[str, int], bool]:
    """Wait for all ranks, or for the first failure and GRACE_S more, or for the deadline."""
    running = dict(pids)
    failed: dict[str, int] = {}
    timed_out = False
    while running:
        for pid in list(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                rank = running.pop(pid)
                code = os.waitstatus_to_exitcode(status)
                if code != 0:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                    failed[str(rank)] = code
        if running and time.monotonic() > deadline:
            timed_out = not failed
            break
        time.sleep(POLL_S)
    return failed, timed_out


def _kill_group(group: int, pids: dict[int, int]) -> None:
    """End what is left of the launch: ranks, and managers or writers that they started."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    for pid in pids:
        try:
            os.waitpid(pid, 0)
        except ChildProcessError:
            pass


def _die_with_parent(number: signal.Signals) -> None:
    """Linux: get this signal when the parent dies, so that no process is left behind."""
    if not Path("/proc/self").exists():
        return
    import ctypes

    ctypes.CDLL(None).prctl(1, int(number))  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    main()

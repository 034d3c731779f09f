"""One process that imports torch and a Megatron-LM tree once, and forks the ranks of every run.

A fork has the imports and nothing else in common with its siblings. Requests come as JSON lines on
standard input, answers go to the file descriptor of the command line; the template ends with its
input. Light at the top: Megatron's workers may import the main module.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
#: After one rank has failed, how long the others may still say what they saw.
GRACE_S = 15.0


def main() -> None:
    options = json.loads(sys.argv[1])
    answers = os.fdopen(options["answer_fd"], "w", buffering=1)
    os.set_inheritable(options["answer_fd"], False)
    _die_with_parent(signal.SIGKILL)
    try:
        import_tree(options["tree"], options["install_first"])
    except BaseException:
        answers.write(json.dumps({"error": traceback.format_exc()}) + "\n")
        raise SystemExit(1) from None
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(launch(json.loads(line))) + "\n")


def import_tree(tree: str, install_first: bool) -> None:
    """All that a rank imports. `install_first`: install() before any of Megatron is imported."""
    sys.path.insert(0, tree)
    if install_first:
        import vime_optim

        vime_optim.install()
    import torch  # noqa: F401  (first: the simulation's own start-up file waits for it)

    from vime_optim.simulate.megatron import prepare

    prepare("torch")
    from clients import stand_ins

    stand_ins.complete_device()
    import gpt_builders  # noqa: F401
    import megatron.training.training
    import model_provider  # noqa: F401

    import vime_optim.fixes
    import vime_optim.installer
    import vime_optim.verify.capture

    stand_ins.skip_fused_kernels()
    found = Path(megatron.training.training.__file__)
    if not found.resolve().is_relative_to(Path(tree).resolve()):
        raise ImportError(f"another Megatron-LM was imported: {found}, expected one below {tree}")


def launch(request: dict[str, Any]) -> dict[str, Any]:
    """Fork the ranks of one run and wait for them; the exit status of each, by rank.

    Args:
        request: `world_size`, `out` (a folder), `phase` (names the files), `port`, `arguments` of
            pretrain_gpt.py, `install`, `adam`, `callers` and `timeout_s`.
    """
    pids: dict[int, int] = {}
    for rank in range(request["world_size"]):
        pid = os.fork()
        if pid == 0:
            _child(request, rank)
        pids[pid] = rank
    try:
        return {"status": _wait(pids, time.monotonic() + request["timeout_s"])}
    finally:
        for pid in pids:  # with what they started: managers, workers, fork servers
            _kill_session(pid)


def _wait(pids: dict[int, int], deadline: float) -> dict[str, int]:
    status: dict[str, int] = {}
    while len(status) < len(pids):
        for pid, rank in pids.items():
            if str(rank) in status:
                continue
            done, code = os.waitpid(pid, os.WNOHANG)
            if done:
                status[str(rank)] = os.waitstatus_to_exitcode(code)
                if status[str(rank)] != 0:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if time.monotonic() > deadline:
            for pid, rank in pids.items():
                if str(rank) not in status:
                    _kill_session(pid)
            deadline = time.monotonic() + GRACE_S
        time.sleep(0.02)
    return status


def _kill_session(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def _child(request: dict[str, Any], rank: int) -> None:
    status = 1
    try:
        os.setsid()
        _die_with_parent(signal.SIGKILL)
        _redirect(f"{request['out']}/{request['phase']}.rank{rank}.log")
        status = run(request, rank)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _redirect(log: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


def run(request: dict[str, Any], rank: int) -> int:
    """The whole script in this rank; its exit status. Leaves a record, however it ends."""
    from clients.record import Record

    os.chdir(request["out"])
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK="0" if request.get("shared_device") else str(rank),
        WORLD_SIZE=str(request["world_size"]),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(request["port"]),
    )
    record = Record(Path(f"{request['out']}/{request['phase']}.rank{rank}.json"))
    error = None
    try:
        _train(request, record)
    except SystemExit as end:
        error = f"SystemExit: {end.code}" if end.code else None
    except BaseException as problem:
        traceback.print_exc()
        error = f"{type(problem).__name__}: {problem}"
    record.write(error)
    return 1 if error else 0


def _train(request: dict[str, Any], record: Any) -> None:
    from clients import callers, frameworks
    from clients.record import watch

    if request["adam"] != "torch":
        from vime_optim.simulate.megatron import prepare

        prepare(request["adam"])
    if request["install"] == "after":
        _install()
    elif request["install"] == "late":
        callers.install_when_the_model_is_built(_install)
    for name in request["callers"]:
        prepare_caller = getattr(callers, name, None) or getattr(frameworks, name)
        prepare_caller(record)
    watch(record)
    script = f"{request['tree']}/pretrain_gpt.py"
    sys.argv = [script, *request["arguments"]]
    print(" ".join(sys.argv), flush=True)
    if request[
        "real_main"
    ]:  # what Megatron spawns imports the whole script again, as in a real run
        runpy.run_path(script, run_name="__main__")
    else:
        _run_without_imports_in_workers(script)


def _run_without_imports_in_workers(script: str) -> None:
    main = sys.modules["__main__"]
    main.__file__, main.__spec__ = str(HERE / "nothing.py"), None
    code = compile(Path(script).read_text(), script, "exec")
    exec(code, {"__name__": "__main__", "__file__": script})


def _install() -> None:
    import vime_optim

    vime_optim.install()


def _die_with_parent(number: signal.Signals) -> None:
    """Linux: get this signal when the parent dies, so that no process is left behind."""
    if Path("/proc/self").exists():
        ctypes.CDLL(None).prctl(1, int(number))  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    main()

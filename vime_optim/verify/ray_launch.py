"""Launches ranks as Ray actors: a new local Ray session for every launch (extra `ray`).

`RayLauncher.run` starts a driver process (this module run as a program), which starts Ray on
127.0.0.1, places one actor a rank, and shuts down what it started. Nothing is shared with another
Ray on the machine, and no process is ended by its name.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from vime_optim.errors import VerifyError
from vime_optim.verify import rank as rank_module
from vime_optim.verify.launch import Launcher, kill_session, rank_environment, start
from vime_optim.verify.rank import Ended, Poll

#: What Ray adds to its folder to name a socket: /session_DATE_TIME_MICROS_PID/sockets/plasma_store
_SOCKET_SUFFIX_BYTES = len("/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
_SOCKET_PATH_BYTES = 107
"""The longest path of a Unix socket on Linux, without the final zero."""

_GRACE_S = 180.0
"""Time that starting and stopping Ray may take on a busy machine, beside the launch itself."""


class RayLauncher(Launcher):
    """See the module. `temp_dir` is where Ray's session lives; a short one is made by default."""

    def __init__(self, tree: Path, device: str = "cpu", temp_dir: Path | None = None) -> None:
        if importlib.util.find_spec("ray") is None:
            raise VerifyError(
                "Ray is not installed",
                next_step="pip install 'vime-optim[ray]', or another launcher",
            )
        super().__init__(tree, device)
        self._own = temp_dir is None
        self._home = temp_dir or Path(tempfile.mkdtemp(prefix="vo-", dir=_short_folder()))
        if not self._own:
            check_socket_room(self._home)

    def _launch(self, request: dict[str, Any]) -> Ended:
        """Each time in a new Ray session."""
        out = Path(request["out"])
        (out / "request.json").write_text(json.dumps({**request, "ray_home": str(self._home)}))
        outcome = out / "ray.json"
        outcome.unlink(missing_ok=True)
        environment = {
            **rank_environment(self._tree, self._device),
            "RAY_USAGE_STATS_ENABLED": "0",  # Ray reports home otherwise
            "RAY_raylet_start_wait_time_s": str(int(_GRACE_S)),
            "RAY_agent_register_timeout_ms": str(int(_GRACE_S * 1000)),
        }
        process = start("ray_launch", [f"{out}/request.json"], out / "ray.log", environment)
        try:
            process.wait(request["timeout_s"] + _GRACE_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            kill_session(process)  # Ray's own processes follow their driver
        if not outcome.exists():
            tail = (out / "ray.log").read_text(errors="replace").strip().splitlines()[-5:]
            raise VerifyError(
                "the Ray session did not come up or did not end",
                got="\n".join(tail) or f"exit status {process.returncode}",
                next_step=f"the output is in {out / 'ray.log'}",
            )
        failed, timed_out = json.loads(outcome.read_text())
        return failed, timed_out

    def close(self) -> None:
        """Remove the session folder that this launcher made."""
        if self._own:
            shutil.rmtree(self._home, ignore_errors=True)


def check_socket_room(folder: Path) -> None:
    """Refuse a folder whose path is too long for Ray's sockets: Ray would fail, or hang.

    Raises:
        VerifyError: the sockets' paths would be longer than 107 bytes.
    """
    room = _SOCKET_PATH_BYTES - _SOCKET_SUFFIX_BYTES
    length = len(os.fsencode(folder.absolute()))
    if length > room:
        raise VerifyError(
            "the folder's path is too long for Ray's sockets",
            where=str(folder),
            got=f"{length} bytes",
            expected=f"at most {room} bytes, as a socket's path has at most {_SOCKET_PATH_BYTES}",
            next_step="choose a shorter one, below /tmp for example",
        )


def _short_folder() -> str:
    """A folder for temporary files with room for a socket's path below it."""
    for folder in (tempfile.gettempdir(), "/tmp"):
        try:
            check_socket_room(Path(folder) / "vo-12345678")
        except VerifyError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    check_socket_room(Path(tempfile.gettempdir()) / "vo-12345678")
    raise VerifyError("no folder for Ray's session can be written", where="/tmp")


def _rank_in_actor(request: dict[str, Any], rank: int) -> int:
    """In the actor: the same as a process of its own would do."""
    with open(f"{request['out']}/rank{rank}.log", "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    rank_module.import_megatron(request["megatron"], request["device"])
    return rank_module.run(request, rank)


def _drive(request: dict[str, Any]) -> Ended:
    """In the driver: one actor a rank; the first failure or the timeout ends all."""
    import ray

    world_size = request["world_size"]
    ray.init(
        address="local",
        num_cpus=world_size,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 << 20,
        _node_ip_address="127.0.0.2",  # loopback; Ray replaces 127.0.0.1 by the address of the host
        _temp_dir=request["ray_home"],
    )
    gpus = 1 if request["device"] == "cuda" else 0

    class Rank:
        def run(self, request: dict[str, Any], rank: int) -> int:
            return _rank_in_actor(request, rank)

    actor = ray.remote(num_cpus=1, num_gpus=gpus)(Rank)
    actors = [actor.remote() for _ in range(world_size)]
    polls = [_poll(ray, a.run.remote(request, rank)) for rank, a in enumerate(actors)]
    ended = rank_module.wait(polls, request["timeout_s"], grace_s=2.0)
    ray.shutdown()
    return ended


def _poll(ray: Any, running: Any) -> Poll:
    def poll() -> int | None:
        if not ray.wait([running], timeout=0.05)[0]:
            return None
        try:
            return int(ray.get(running))
        except Exception as error:
            print(error, flush=True)
            return 1

    return poll


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    rank_module.write_json(Path(request["out"]) / "ray.json", _drive(request))


if __name__ == "__main__":
    # Actors import this by name; what runs as __main__ would be pickled by value.
    from vime_optim.verify import ray_launch

    ray_launch.main()

"""Ranks as Ray actors: an exact resume across two Ray sessions, and paths that are too long."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import Case
from vime_optim.errors import VerifyError
from vime_optim.tools.megatron_source import fetch
from vime_optim.verify.launch import RankFailure
from vime_optim.verify.ray_launch import RayLauncher, check_socket_room
from vime_optim.verify.runner import run_case

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray: the extra `ray` is not installed"
)


def boom(payload: dict[str, object]) -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("rank one fails")


def test_long_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VerifyError, match="too long for Ray's sockets"):
        check_socket_room(tmp_path / ("x" * 90))
    check_socket_room(Path("/tmp/vo-12345678"))


@needs_ray
def test_actors_resume_exactly_in_a_new_session(tmp_path: Path) -> None:
    case = Case.parse("0.16.1,hybrid,pao,f=0.5,dp=2,async=persistent")
    with RayLauncher(fetch("0.16.1")) as launcher:
        outcome = run_case(launcher, case, tmp_path, timeout_s=400)
    assert outcome.exact, f"{outcome.summary()}\n{outcome.traceback}"
    assert outcome.sound
    assert outcome.hits["step"] > 0
    assert outcome.hits["gather-free"] > 0


@needs_ray
def test_failure_of_one_actor_is_reported(tmp_path: Path) -> None:
    with RayLauncher(fetch("0.16.1")) as launcher, pytest.raises(RankFailure) as failure:
        launcher.run(
            "tests.verify.test_ray:boom", world_size=2, payload={}, out=tmp_path, timeout_s=300
        )
    assert failure.value.rank == 1
    assert failure.value.message == "rank one fails"


@needs_ray
def test_worker_hook_patches_in_the_actor_alone(tmp_path: Path) -> None:
    """As the documentation says: Ray gets the name of the hook, and the driver calls nothing."""
    script = tmp_path / "driver.py"
    script.write_text(
        """
import json, sys, tempfile
import ray

class Trainer:
    def state(self):
        early = sorted({"torch", "vime_optim.fixes"} & set(sys.modules))
        import megatron.core
        import vime_optim
        return [early, vime_optim.status().installed]

with tempfile.TemporaryDirectory(prefix="vo-", dir="/tmp") as home:
    ray.init(
        address="local", num_cpus=1, include_dashboard=False, log_to_driver=False,
        object_store_memory=80 << 20, _node_ip_address="127.0.0.2", _temp_dir=home,
        runtime_env={"worker_process_setup_hook": "vime_optim.hooks.ray_worker"},
    )
    answer = ray.get(ray.remote(num_cpus=1)(Trainer).remote().state.remote(), timeout=200)
    ray.shutdown()
print(json.dumps([answer, "vime_optim" in sys.modules]))
"""
    )
    path = os.pathsep.join([str(fetch("0.16.1")), str(Path(__file__).parents[2])])
    env = {**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"}
    env |= {"RAY_raylet_start_wait_time_s": "180", "RAY_agent_register_timeout_ms": "180000"}
    done = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (early, installed), in_driver = json.loads(done.stdout.splitlines()[-1])
    assert early == []
    assert installed
    assert not in_driver

"""Ranks as Ray actors: an exact resume across two Ray sessions, and paths that are too long."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from vime_optim.errors import VerifyError
from vime_optim.megatron_source import fetch
from vime_optim.verify.case import Case
from vime_optim.verify.launch import RankFailure
from vime_optim.verify.ray_launch import RayLauncher, check_socket_room
from vime_optim.verify.runner import run_case

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="the extra `ray` is not installed"
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

"""Carries the simulated device into child processes: spawned writers, managers, launched ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "VIME_OPTIM_SIMULATE"


def bootstrap_env(env: Mapping[str, str]) -> dict[str, str]:
    """A copy of `env` under which every Python child switches the simulation on.

    PYTHONPATH gets this folder, whose sitecustomize.py waits for `import torch` (a child that never
    imports torch pays nothing), and the folder that holds vime_optim.
    """
    here = Path(__file__).resolve().parent
    wanted = [str(here), str(here.parents[2])]
    present = [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    result = dict(env)
    result["PYTHONPATH"] = os.pathsep.join(wanted + [e for e in present if e not in wanted])
    result[VARIABLE] = "1"
    return result

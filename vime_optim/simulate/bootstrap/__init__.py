"""Carries the simulated device into child processes: spawned writers, managers, launched ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "VIME_OPTIM_SIMULATE"


def without_gpu(env: Mapping[str, str]) -> dict[str, str]:
    """A copy of `env` under which megatron-core can be imported with a CUDA torch and no GPU.

    Some modules compile a CUDA extension when they are imported. torch then asks the GPUs that are
    there for their architecture, and fails in passing where there is none (IndexError, or `max()`
    of nothing) instead of in a way that Megatron expects. Any architecture will do.
    """
    return {"TORCH_CUDA_ARCH_LIST": "9.0", **env}


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
    return without_gpu(result)

"""Run by Python at start where bootstrap_env() put this folder on PYTHONPATH.

Imports nothing heavy: the simulation is switched on when, and if, the process imports torch.
"""

import importlib.machinery
import importlib.util
import os
import sys
from typing import Any


def _simulate(torch: Any) -> None:
    from vime_optim.simulate.device import enable
    from vime_optim.simulate.triton_stub import provide_triton

    enable()
    provide_triton()


def _run_shadowed() -> None:
    """Runs the sitecustomize that this one hides, if the installation has its own."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("VIME_OPTIM_SIMULATE") == "1":
    import wrapt

    wrapt.register_post_import_hook(_simulate, "torch")
_run_shadowed()

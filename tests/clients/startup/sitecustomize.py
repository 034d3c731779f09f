"""Run at the start of every Python process below a template: what Megatron-LM wants of its home.

On PYTHONPATH behind the simulated device's own start-up file, which runs this one too. Imports
nothing heavy.
"""

import os
import sys
import typing

if not hasattr(typing, "override"):  # Megatron-LM 0.19 and newer are written for Python 3.12
    try:
        from typing_extensions import override
    except ImportError:
        pass
    else:
        typing.override = override  # type: ignore[attr-defined]

if os.environ.get("CLIENTS_WITHOUT_NVRX") == "1":
    # Where an older nvidia-resiliency-ext is installed, Megatron-LM 0.19 cannot be imported.
    sys.modules["nvidia_resiliency_ext"] = None  # type: ignore[assignment]

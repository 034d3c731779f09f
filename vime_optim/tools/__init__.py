"""A Megatron checkpoint directory, read, compared, mended and exported without Megatron running.

Importing this package loads nothing; each name is found when it is asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "diff_checkpoints": "vime_optim.tools.diff",
    "export_checkpoint": "vime_optim.tools.export",
    "import_checkpoint": "vime_optim.tools.importer",
    "inspect_checkpoint": "vime_optim.tools.inspect",
    "load_common": "vime_optim.files.safe_load",
    "load_safetensors": "vime_optim.tools.safetensors_io",
    "repair_checkpoint": "vime_optim.tools.repair",
    "save_common": "vime_optim.files.safe_load",
    "strip_classes": "vime_optim.files.safe_load",
}

__all__ = sorted(_NAMES)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_NAMES[name]), name)

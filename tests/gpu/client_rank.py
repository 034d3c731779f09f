"""One rank of the real pretrain_gpt.py on a GPU: `python client_rank.py REQUEST.json RANK`.

What tests/clients does on the simulated device, in fresh processes: CUDA does not survive a fork.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    rank = int(sys.argv[2])
    sys.path[:0] = [request["tree"], str(TESTS.parent), str(TESTS), *request["paths"]]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[: 3 + len(request["paths"])]) + (
        os.pathsep + os.environ.get("PYTHONPATH", "")
    )
    import megatron.training.training  # noqa: F401  (before install(): "after" its imports)
    from clients import stand_ins, template

    stand_ins.skip_fused_kernels()
    if request["shared_device"]:
        from benchmarks.staging import stage_collectives

        stage_collectives()
        stand_ins.forget_device_id()
    if request["fp32_masters"]:
        _without_remainders()
    os._exit(template.run(request, rank))


def _without_remainders() -> None:
    """No option of pretrain_gpt.py asks Transformer Engine for whole fp32 masters."""
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    original: Any = OptimizerConfig.__post_init__

    def __post_init__(self: Any) -> None:
        self.store_param_remainders = False
        original(self)

    OptimizerConfig.__post_init__ = __post_init__


if __name__ == "__main__":
    main()

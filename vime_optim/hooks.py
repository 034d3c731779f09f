"""Ways in that frameworks offer: functions to name in their configuration.

Settings come from the environment (VIME_OPTIM_...), since a hook has no arguments of ours.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


def slime_init(args: Any) -> None:
    """For `--custom-megatron-init-path vime_optim.hooks.slime_init` of slime and vime.

    They call it in each Megatron rank with the parsed arguments, when the process groups are there
    and before the optimizer is built. The arguments are not changed.
    """
    from vime_optim import install

    install()


def ray_worker() -> None:
    """For Ray: `runtime_env={"worker_process_setup_hook": "vime_optim.hooks.ray_worker"}`.

    Ray calls it in every worker of the job, rollout engines too, and a worker whose hook raises
    dies. So it does nothing but wait for the import of Megatron: a worker that never imports it
    loads neither torch nor the fixes.
    """
    on_megatron_import()


def on_megatron_import() -> None:
    """install() when this process imports `megatron.core`, or now if it has.

    For a `sitecustomize`, which every Python process of an environment runs. An error of install()
    is raised by that import.
    """
    core = sys.modules.get("megatron.core")
    if core is not None and not getattr(core.__spec__, "_initializing", False):
        _install(core)
        return
    import wrapt

    wrapt.register_post_import_hook(_install, "megatron.core")


def _install(core: ModuleType) -> None:
    from vime_optim import install

    install()

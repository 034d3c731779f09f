"""What the simulated device lacks to carry megatron.training's main loop, set from outside.

Nothing here touches an optimizer or a checkpoint.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

HARMLESS: dict[str, Any] = {
    "is_available": lambda: True,  # "Megatron requires CUDA."
    "memory_stats": lambda *args, **kwargs: defaultdict(int),
    "reset_max_memory_allocated": lambda *args, **kwargs: None,
    "get_arch_list": lambda: [],
    "utilization": lambda *args, **kwargs: 0,
}


def complete_device() -> None:
    """Call after `vime_optim.simulate.megatron.prepare`, before megatron.training is imported."""
    import torch

    torch.set_num_threads(1)
    for name, value in HARMLESS.items():
        setattr(torch.cuda, name, value)
    forget_device_id()
    _give_loaders_a_generator(torch.utils.data.DataLoader)


def skip_fused_kernels() -> None:
    """Up to 0.16 nvcc compiles kernels at start, which nothing here uses."""
    try:
        from megatron.legacy import fused_kernels
    except ImportError:
        return
    fused_kernels.load = lambda args: None


def forget_device_id() -> None:
    """gloo and a device_id do not go together."""
    import torch

    distributed: Any = torch.distributed
    original = distributed.init_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        return original(*args, **kwargs)

    distributed.init_process_group = init_process_group


def _give_loaders_a_generator(loader: Any) -> None:
    """An iterator draws a seed from the host's generator, in a resumed run after the load.

    The simulated device draws dropout from that same generator; a real one has its own.
    """
    import torch

    original = loader.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(7)

    loader.__init__ = __init__

"""Megatron's optimizer of a case: its config, its param groups and their order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vime_optim.errors import VerifyError
from vime_optim.verify.case import Backend, Case

LR = 2e-2
MIN_LR = 1e-4
#: What one of two param groups that are alike otherwise has of its own.
OWN_MAX_LR = 5e-3
OWN_MIN_LR = 1e-3

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}


def optimizer_config(backend: Backend, case: Case | None = None) -> Any:
    """Megatron's OptimizerConfig for one backend (and what the case asks beyond it)."""
    from megatron.core.optimizer import OptimizerConfig

    fp16 = case is not None and case.fp16
    values: dict[str, Any] = {
        "optimizer": "adam",
        "lr": LR,
        "min_lr": MIN_LR,
        "weight_decay": 0.05,
        "fp16": fp16,
        "bf16": not fp16,
        "params_dtype": torch.float16 if fp16 else torch.bfloat16,
        "use_distributed_optimizer": True,
        "clip_grad": 1.0,
        "use_precision_aware_optimizer": backend.pao,
        "store_param_remainders": backend.remainders,
        "exp_avg_dtype": DTYPES[backend.exp_avg_dtype],
        "exp_avg_sq_dtype": DTYPES[backend.exp_avg_sq_dtype],
    }
    if case is not None and fp16:
        # A short window, so that a scaler that starts too high is still searching at the save.
        values.update(
            initial_loss_scale=2.0**case.loss_scale_log2, loss_scale_window=3, hysteresis=2
        )
    if case is not None and case.groups == "decoupled":
        values.update(decoupled_lr=OWN_MAX_LR, decoupled_min_lr=OWN_MIN_LR)
    if backend.optimizer == "hybrid":
        values.update(
            optimizer_cpu_offload=True,
            optimizer_offload_fraction=backend.offload_fraction,
            overlap_cpu_optimizer_d2h_h2d=True,
        )
    known = {field.name for field in dataclasses.fields(OptimizerConfig)}
    if backend.capturable:
        if "optimizer_cuda_graph" not in known:
            raise VerifyError("megatron-core has capturable optimizers since 0.17")
        values.update(optimizer_cuda_graph=True)
    return OptimizerConfig(**{name: value for name, value in values.items() if name in known})


def build_optimizer(case: Case, backend: Backend, model: Any, *, loading: bool = False) -> Any:
    """Megatron's optimizer, with the param groups that the case asks for."""
    from megatron.core.optimizer import get_megatron_optimizer

    config = optimizer_config(backend, case)
    with _reversed_groups(case.regrouped and loading):
        return get_megatron_optimizer(config, [model], **_overrides(case, config))


def _overrides(case: Case, config: Any) -> dict[str, Any]:
    """Arguments that give the output projections of attention a param group of their own."""
    own = {
        "max_lr": {"max_lr": OWN_MAX_LR},
        "min_lr": {"min_lr": OWN_MIN_LR},
        "both": {"max_lr": OWN_MAX_LR, "min_lr": OWN_MIN_LR},
        "wd_mult": {"wd_mult": 0.5},
    }.get(case.groups)
    if own is None:
        return {}
    try:
        from megatron.core.optimizer import ParamKey, get_standard_config_overrides
    except ImportError:  # 0.15 knows one multiplier of the learning rate instead
        return {"scale_lr_cond": lambda name, _: "linear_proj" in name, "lr_mult": 0.25}
    return {
        "config_overrides": {
            **get_standard_config_overrides(config),
            ParamKey(name="*linear_proj.weight"): own,
        }
    }


@contextmanager
def _reversed_groups(is_on: bool) -> Iterator[None]:
    """Megatron sorts the groups; another release, or other overrides, would order them anew."""
    from megatron.core import optimizer as module

    original: Any = module._get_param_groups
    if is_on:
        module._get_param_groups = lambda *a, **k: original(*a, **k)[::-1]
    try:
        yield
    finally:
        module._get_param_groups = original

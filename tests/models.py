"""Builds what the cases of the tests train with, beyond those of `vime-optim verify`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.cases import Backend, Case
from vime_optim.errors import VerifyError
from vime_optim.verify import model
from vime_optim.verify.model import NUM_LAYERS, Job, optimizer_config

#: What one of two param groups that are alike otherwise has of its own.
OWN_MAX_LR = 5e-3
OWN_MIN_LR = 1e-3


class Builder(model.Builder):
    case: Case
    backend: Backend

    def prepare(self) -> None:
        from tests.simulate import apex
        from vime_optim.simulate import device, megatron

        if self.backend.apex and device.is_enabled():
            apex.prepare()
        elif self.backend.torch_only and device.is_enabled():
            megatron.prepare("torch")
        else:
            super().prepare()

    def build(self) -> Job:
        job = super().build()
        if self.case.fp16:
            job.model.config.grad_scale_func = job.optimizer.scale_loss
        return job

    def model_config(self) -> dict[str, Any]:
        values = super().model_config()
        values["qk_layernorm"] = self.case.qk_norm
        if self.case.fp16:
            half = torch.float16
            values |= {"fp16": True, "bf16": False, "params_dtype": half, "pipeline_dtype": half}
        if self.case.moe_layers != "all":
            where = 0 if self.case.moe_layers == "first" else NUM_LAYERS - 1
            values["moe_layer_freq"] = [int(layer == where) for layer in range(NUM_LAYERS)]
        return values

    def layer_spec(self, config: Any) -> Any:
        from megatron.core.models.gpt import gpt_layer_specs

        if self.case.moe_layers == "all":
            return super().layer_spec(config)
        return gpt_layer_specs.get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=config.normalization
        )

    def change_parameters(self, gpt: Any) -> None:
        if self.case.fp32_norm:
            _keep_input_norms_in_fp32(gpt)
        for name, parameter in gpt.named_parameters():
            if self.case.trained != "all":
                parameter.requires_grad_((".experts." in name) == (self.case.trained == "experts"))

    def bucket_numel(self) -> int | None:
        usual = super().bucket_numel()
        return usual and (self.case.bucket_numel or usual)

    def build_optimizer(self, model: Any) -> Any:
        from megatron.core.optimizer import get_megatron_optimizer

        config = optimizer_config(self.optimizer_values())
        with _reversed_groups(self.case.regrouped and self.loading):
            return get_megatron_optimizer(config, [model], **_overrides(self.case, config))

    def optimizer_values(self) -> dict[str, Any]:
        values = super().optimizer_values()
        if self.case.fp16:
            # A short window, so that a scaler that starts too high is still searching at the save.
            values |= {"fp16": True, "bf16": False, "params_dtype": torch.float16}
            values |= {"initial_loss_scale": 2.0**self.case.loss_scale_log2}
            values |= {"loss_scale_window": 3, "hysteresis": 2}
        if self.case.groups == "decoupled":
            values |= {"decoupled_lr": OWN_MAX_LR, "decoupled_min_lr": OWN_MIN_LR}
        if self.backend.capturable:
            from megatron.core.optimizer import OptimizerConfig

            if "optimizer_cuda_graph" not in {f.name for f in dataclasses.fields(OptimizerConfig)}:
                raise VerifyError("megatron-core has capturable optimizers since 0.17")
            values["optimizer_cuda_graph"] = True
        return values


def _keep_input_norms_in_fp32(gpt: Any) -> None:
    """Make the input norms fp32, as routers and some norms are in real models.

    All of them: layers are stacked under one checkpoint key, which has one dtype.
    """
    for layer in gpt.decoder.layers:
        norm = layer.input_layernorm
        norm.weight.data = norm.weight.data.float()
        norm.forward = _in_fp32(norm.forward)


def _in_fp32(plain: Any) -> Any:
    def forward(x: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        result: torch.Tensor = plain(x.float(), *rest, **named)
        return result.to(x.dtype)

    return forward


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

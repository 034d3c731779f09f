"""The cases of the tests: those of `vime-optim verify`, more of each kind, and a short spelling.

`Case.parse` reads and `Case.name` writes it, for example
``0.16.1,hybrid,pao,f=0.5,fully_reshardable,dp=2->3``. Words are separated by commas:

- the optimizer: ``hybrid`` (HybridDeviceOptimizer), ``fused`` (FusedAdam), ``torch`` (AdamW);
  then ``apex``: FusedAdam is NVIDIA Apex's, not Transformer Engine's (in ``fused,apex,nopao``, and
  in ``hybrid,apex`` on the device); ``capturable``: lr and step are tensors (Apex, since 0.17),
- ``pao`` or ``nopao``; ``f=`` the offload fraction; ``m=`` and ``v=`` the dtypes of exp_avg and
  exp_avg_sq (fp32, bf16, fp16, fp8); ``rem`` or ``norem`` for store_param_remainders;
  ``torchonly`` (neither Transformer Engine nor Apex is there),
- the format: ``fully_reshardable``, ``dp_reshardable``, ``default`` (the caller passes no type),
- ``dp= tp= pp= ep=``: ``2`` or ``2->3`` for another size at load,
- ``load:WORD`` gives the loading optimizer another value than the saving one,
- ``moe``, ``moe-on=first`` or ``last`` (experts in that layer alone); ``train=dense`` or
  ``experts`` (the rest is frozen); ``tied``; ``fp32norm`` (fp32 input norms); ``noqk`` (no norms of
  queries and keys, so that all norms have one size),
- ``groups=``: param groups that differ in one thing alone: ``max_lr``, ``min_lr``, ``wd_mult``,
  ``decoupled`` (the learning rate of embedding and output) or ``both`` (max_lr, min_lr);
  ``regrouped``: the loading optimizer has them in reverse order,
- ``fp16``: float16 parameters and a dynamic grad scaler, which starts at 2 to the power ``scale=``,
- ``1bucket``: one bucket instead of several; ``bucket=``: their size in elements. With several
  padded ones, stock megatron-core writes shifted values into fully_reshardable checkpoints, so
  compare its other faults with one,
- ``stock`` (without vime_optim.install()), ``model-only`` (load the weights alone),
- ``training`` (save and load through megatron.training.checkpointing, since 0.17),
- ``async=forked`` or ``async=persistent``; ``steps=`` (0 saves before the first one), ``more=``,
  ``every=`` (save interval).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from vime_optim.errors import VerifyError
from vime_optim.tools.megatron_source import resolve
from vime_optim.verify import case as verify
from vime_optim.verify.case import Layout, one_of

#: Source trees of Megatron-LM beside the releases (tests/clients/trees.py), and the release whose
#: ways each has.
SOURCE_TREES = {"main": "0.20", "slime": "0.16"}
GROUPS = ("none", "max_lr", "min_lr", "both", "wd_mult", "decoupled")


@dataclass(frozen=True)
class Backend(verify.Backend):
    torch_only: bool = False
    apex: bool = False
    capturable: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.apex and (self.optimizer == "torch" or self.torch_only):
            raise VerifyError("Apex is the FusedAdam of no optimizer here", got=self.optimizer)
        if self.apex and self.optimizer == "fused" and self.pao:
            raise VerifyError("Apex's FusedAdam is not precision-aware", got="fused,apex,pao")
        if self.capturable and not (self.apex and self.optimizer == "fused"):
            raise VerifyError("capturable goes with fused,apex alone", got=self.optimizer)

    def words(self) -> list[str]:
        first, *rest = super().words()
        words = [first] + ["apex"] * self.apex + rest
        return words + ["torchonly"] * self.torch_only + ["capturable"] * self.capturable


@dataclass(frozen=True)
class Case(verify.Case):
    """See the module's docstring; `bucket_numel` in elements."""

    builder: ClassVar[str] = "tests.models:Builder"

    backend: Backend = field(default_factory=Backend)
    load_backend: Backend = field(default_factory=Backend)
    moe_layers: str = "all"
    trained: str = "all"
    fp32_norm: bool = False
    qk_norm: bool = True
    groups: str = "none"
    regrouped: bool = False
    fp16: bool = False
    loss_scale_log2: int = 16
    bucket_numel: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("the layers with experts", self.moe_layers, ("all", "first", "last"))
        one_of("the trained part", self.trained, ("all", "dense", "experts"))
        one_of("the kind of param groups", self.groups, GROUPS)

    @property
    def goes_on_alike(self) -> bool:
        return super().goes_on_alike and not self.regrouped

    @property
    def has_moments(self) -> bool:
        return super().has_moments and not self.fp16  # float16's scaler may skip every step

    @property
    def not_compared(self) -> frozenset[str]:
        """One of two optimizers keeps the learning rate in float32."""
        alike = self.backend.capturable == self.load_backend.capturable
        return frozenset() if alike else frozenset({"group.lr"})

    def model_words(self) -> list[str]:
        flags = {"moe": self.moe != "none", "tied": self.tied, "fp32norm": self.fp32_norm}
        flags |= {"regrouped": self.regrouped, "noqk": not self.qk_norm, "fp16": self.fp16}
        flags |= {"1bucket": self.one_bucket}
        words = [word for word, is_on in flags.items() if is_on]
        for word, value, usual in (
            ("moe-on", self.moe_layers, "all"),
            ("train", self.trained, "all"),
            ("groups", self.groups, "none"),
            ("scale", self.loss_scale_log2, 16),
            ("bucket", self.bucket_numel, None),
        ):
            if value != usual:
                words.append(f"{word}={value}")
        return words

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "type": f"{__name__}:Case"}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Case:
        return super().from_dict({key: value for key, value in values.items() if key != "type"})

    @classmethod
    def parse(cls, text: str, *, megatron: str | None = None) -> Case:
        """A case from its short spelling.

        Raises:
            VerifyError: a word that means nothing, or a value out of range.
        """
        return _parse(text, megatron)


def tree_of(megatron: str) -> Path:
    """The folder for `sys.path` of a case's megatron-core: a path, a release, or a source tree.

    Raises:
        NoTree: the source tree is not here.
    """
    if megatron not in SOURCE_TREES:
        return resolve(megatron)
    from tests.clients import trees

    return trees.find(f"megatron-lm-{megatron}")


_FLAGS: dict[str, tuple[str, Any]] = {
    "fully_reshardable": ("sharding", "fully_reshardable"),
    "dp_reshardable": ("sharding", "dp_reshardable"),
    "default": ("sharding", None),
    "moe": ("moe", "sequential"),
    "tied": ("tied", True),
    "fp32norm": ("fp32_norm", True),
    "noqk": ("qk_norm", False),
    "regrouped": ("regrouped", True),
    "fp16": ("fp16", True),
    "1bucket": ("one_bucket", True),
    "stock": ("install", False),
    "model-only": ("model_only", True),
    "training": ("via_training", True),
}
_NUMBERS = {
    "steps": "num_steps",
    "more": "more_steps",
    "every": "save_interval",
    "scale": "loss_scale_log2",
    "bucket": "bucket_numel",
}
_TEXTS = {
    "async": "async_mode",
    "moe-on": "moe_layers",
    "train": "trained",
    "groups": "groups",
}
_BACKEND_FLAGS: dict[str, dict[str, Any]] = {
    # Whose FusedAdam it is belongs to the optimizer, and follows it.
    "hybrid": {"optimizer": "hybrid", "apex": False, "capturable": False},
    "fused": {"optimizer": "fused", "apex": False, "capturable": False},
    "torch": {"optimizer": "torch", "apex": False, "capturable": False, "pao": False},
    "pao": {"pao": True},
    "nopao": {"pao": False},
    "rem": {"remainders": True},
    "norem": {"remainders": False},
    "torchonly": {"torch_only": True},
    "apex": {"apex": True},
    "capturable": {"capturable": True},
}
_RELEASE = re.compile(r"\d+\.\d")
_BACKEND_VALUES = {"f": "offload_fraction", "m": "exp_avg_dtype", "v": "exp_avg_sq_dtype"}


def _backend_change(word: str) -> dict[str, Any] | None:
    if word in _BACKEND_FLAGS:
        return _BACKEND_FLAGS[word]
    key, found, value = word.partition("=")
    if not found or key not in _BACKEND_VALUES:
        return None
    return {_BACKEND_VALUES[key]: _number(word, value, float) if key == "f" else value}


def _number(word: str, value: str, kind: type[Any]) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise VerifyError("a word of a verify case has no number", got=word) from None


def _parse(text: str, megatron: str | None) -> Case:
    values: dict[str, Any] = {}
    backend: dict[str, Any] = {}
    load_backend: dict[str, Any] = {}
    sizes: tuple[dict[str, int], dict[str, int]] = ({}, {})
    for word in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = word.partition("=")
        change = _backend_change(word.removeprefix("load:"))
        if change is not None:
            (load_backend if word.startswith("load:") else backend).update(change)
        elif word in _FLAGS:
            values[_FLAGS[word][0]] = _FLAGS[word][1]
        elif key in ("dp", "tp", "pp", "ep") and value:
            here, _, there = value.partition("->")
            sizes[0][key] = _number(word, here, int)
            sizes[1][key] = _number(word, there or here, int)
        elif key in _NUMBERS and value:
            values[_NUMBERS[key]] = _number(word, value, int)
        elif key in _TEXTS and value:
            values[_TEXTS[key]] = value
        elif _RELEASE.match(word) or word in SOURCE_TREES or "/" in word:
            values["megatron"] = word
        else:
            raise VerifyError(
                "a word of a verify case is unknown",
                got=word,
                next_step="the words are listed at the top of tests/cases.py",
            )
    if megatron is not None:
        values["megatron"] = megatron
    return Case(
        backend=Backend(**backend),
        load_backend=Backend(**{**backend, **load_backend}),
        layout=Layout(**sizes[0]),
        load_layout=Layout(**sizes[1]),
        **values,
    )

"""One verify case: what is trained, saved, loaded and compared. Plain data, no torch.

A case has a compact spelling that `Case.parse` reads and `Case.name` writes, for example
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
- ``moe`` or ``moe-grouped``, ``moe-on=first`` or ``last`` (experts in that layer alone);
  ``train=dense`` or ``experts`` (the rest is frozen); ``tied``; ``fp32norm`` (fp32 input norms);
  ``noqk`` (no norms of queries and keys, so that all norms have one size),
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

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any

from vime_optim.errors import VerifyError
from vime_optim.tools.megatron_source import SOURCE_TREES

OPTIMIZERS = ("hybrid", "fused", "torch")
SHARDINGS = ("fully_reshardable", "dp_reshardable")
DTYPES = ("fp32", "bf16", "fp16", "fp8")
ASYNC_MODES = ("off", "forked", "persistent")
MOE_KINDS = ("none", "sequential", "grouped")
MOE_LAYERS = ("all", "first", "last")
TRAINED = ("all", "dense", "experts")
GROUPS = ("none", "max_lr", "min_lr", "both", "wd_mult", "decoupled")


@dataclass(frozen=True)
class Layout:
    """Parallel sizes of one launch; `ep` divides `dp`, as in Megatron."""

    dp: int = 2
    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp


@dataclass(frozen=True)
class Backend:
    """The optimizer of one side. `offload_fraction` matters to `hybrid` alone."""

    optimizer: str = "hybrid"
    offload_fraction: float = 1.0
    pao: bool = True
    exp_avg_dtype: str = "fp32"
    exp_avg_sq_dtype: str = "fp32"
    remainders: bool = True
    torch_only: bool = False
    apex: bool = False
    capturable: bool = False


@dataclass(frozen=True)
class Case:
    """See the module's docstring; sizes in elements, steps counted from 1."""

    megatron: str = "0.16.1"
    backend: Backend = field(default_factory=Backend)
    load_backend: Backend = field(default_factory=Backend)
    layout: Layout = field(default_factory=Layout)
    load_layout: Layout = field(default_factory=Layout)
    sharding: str | None = "fully_reshardable"
    moe: str = "none"
    moe_layers: str = "all"
    trained: str = "all"
    tied: bool = False
    fp32_norm: bool = False
    qk_norm: bool = True
    groups: str = "none"
    regrouped: bool = False
    fp16: bool = False
    loss_scale_log2: int = 16
    one_bucket: bool = False
    bucket_numel: int | None = None
    install: bool = True
    model_only: bool = False
    async_mode: str = "off"
    via_training: bool = False
    num_steps: int = 3
    more_steps: int = 2
    save_interval: int | None = None
    seed: int = 1234

    def __post_init__(self) -> None:
        for label, layout in (("save", self.layout), ("load", self.load_layout)):
            _check_layout(label, layout)
        for backend in (self.backend, self.load_backend):
            _check_backend(backend)
        _one_of("the sharding type", self.sharding, (*SHARDINGS, None))
        _one_of("the async mode", self.async_mode, ASYNC_MODES)
        _one_of("the kind of MoE", self.moe, MOE_KINDS)
        _one_of("the layers with experts", self.moe_layers, MOE_LAYERS)
        _one_of("the trained part", self.trained, TRAINED)
        _one_of("the kind of param groups", self.groups, GROUPS)
        if self.via_training and self.async_mode != "off":
            raise VerifyError("an async save through megatron.training is not among the cases")
        if self.num_steps < 0 or self.more_steps < 0:
            raise VerifyError(
                "a verify case has no negative number of steps",
                got=f"num_steps={self.num_steps}, more_steps={self.more_steps}",
            )
        if self.save_interval is not None and self.save_interval < 1:
            raise VerifyError("the save interval must be at least 1", got=self.save_interval)

    @property
    def total_steps(self) -> int:
        return self.num_steps + self.more_steps

    @property
    def save_steps(self) -> tuple[int, ...]:
        """Iterations after which a checkpoint is written; the last is always `num_steps`."""
        every = self.save_interval or max(self.num_steps, 1)
        regular = range(every, self.num_steps + 1, every)
        return tuple(sorted({*regular, self.num_steps}))

    @property
    def same_layout(self) -> bool:
        return self.layout == self.load_layout

    @property
    def same_backend(self) -> bool:
        return self.backend == self.load_backend

    @property
    def name(self) -> str:
        words = [self.megatron, *_backend_words(self.backend), self.sharding or "default"]
        for size in ("dp", "tp", "pp", "ep"):
            here, there = getattr(self.layout, size), getattr(self.load_layout, size)
            if size == "dp" or (here, there) != (1, 1):
                words.append(f"{size}={here}" if here == there else f"{size}={here}->{there}")
        if not self.same_backend:
            words += [f"load:{word}" for word in _backend_words(self.load_backend)]
        words += _model_words(self)
        words += ["model-only"] * self.model_only + ["training"] * self.via_training
        for word, value, default in (
            ("async", self.async_mode, "off"),
            ("steps", self.num_steps, 3),
            ("more", self.more_steps, 2),
            ("every", self.save_interval, None),
        ):
            if value != default:
                words.append(f"{word}={value}")
        words += ["stock"] * (not self.install)
        return ",".join(words)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Case:
        """Inverse of `to_dict`; VerifyError when a field is missing or unknown."""
        values = dict(values)
        try:
            for key, kind in _NESTED.items():
                values[key] = kind(**values[key])
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise VerifyError(
                "the description of a verify case cannot be read",
                got=repr(error),
                next_step="save again with this version of vime_optim",
            ) from None

    @classmethod
    def parse(cls, text: str, *, megatron: str | None = None) -> Case:
        """A case from its compact spelling.

        Raises:
            VerifyError: a word that means nothing, or a value out of range.
        """
        return _parse(text, megatron)

    def replace(self, **changes: Any) -> Case:
        return dataclasses.replace(self, **changes)


_NESTED: dict[str, type] = {
    "backend": Backend,
    "load_backend": Backend,
    "layout": Layout,
    "load_layout": Layout,
}


def _check_layout(label: str, layout: Layout) -> None:
    sizes = dataclasses.asdict(layout)
    if min(sizes.values()) < 1:
        raise VerifyError(f"a parallel size of the {label} layout is below 1", got=sizes)
    if layout.dp % layout.ep:
        raise VerifyError(
            f"the expert-parallel size of the {label} layout must divide the data-parallel size",
            got=f"dp={layout.dp}, ep={layout.ep}",
        )


def _check_backend(backend: Backend) -> None:
    _one_of("the optimizer", backend.optimizer, OPTIMIZERS)
    _one_of("the dtype of exp_avg", backend.exp_avg_dtype, DTYPES)
    _one_of("the dtype of exp_avg_sq", backend.exp_avg_sq_dtype, DTYPES)
    if backend.apex and (backend.optimizer == "torch" or backend.torch_only):
        raise VerifyError("Apex is the FusedAdam of no optimizer here", got="apex and torch alone")
    if backend.apex and backend.optimizer == "fused" and backend.pao:
        raise VerifyError("Apex's FusedAdam is not precision-aware", got="fused,apex,pao")
    if backend.capturable and not (backend.apex and backend.optimizer == "fused"):
        raise VerifyError("capturable goes with fused,apex alone", got=backend.optimizer)
    if not 0.0 <= backend.offload_fraction <= 1.0:
        raise VerifyError(
            "the offload fraction is not within 0 and 1", got=backend.offload_fraction
        )


def _one_of(what: str, got: object, allowed: tuple[object, ...]) -> None:
    if got not in allowed:
        raise VerifyError(f"{what} is unknown", got=got, expected=", ".join(map(str, allowed)))


def _backend_words(backend: Backend) -> list[str]:
    words = [backend.optimizer] + ["apex"] * backend.apex
    if backend.optimizer != "torch":
        words.append("pao" if backend.pao else "nopao")
    if backend.optimizer == "hybrid":
        words.append(f"f={backend.offload_fraction:g}")
    words += [f"m={backend.exp_avg_dtype}"] * (backend.exp_avg_dtype != "fp32")
    words += [f"v={backend.exp_avg_sq_dtype}"] * (backend.exp_avg_sq_dtype != "fp32")
    words += ["norem"] * (not backend.remainders)
    return words + ["torchonly"] * backend.torch_only + ["capturable"] * backend.capturable


def _model_words(case: Case) -> list[str]:
    words = [] if case.moe == "none" else ["moe" if case.moe == "sequential" else "moe-grouped"]
    flags = {"tied": case.tied, "fp32norm": case.fp32_norm, "regrouped": case.regrouped}
    flags |= {"noqk": not case.qk_norm, "fp16": case.fp16, "1bucket": case.one_bucket}
    words += [word for word, is_on in flags.items() if is_on]
    for word, value, default in (
        ("moe-on", case.moe_layers, "all"),
        ("train", case.trained, "all"),
        ("groups", case.groups, "none"),
        ("scale", case.loss_scale_log2, 16),
        ("bucket", case.bucket_numel, None),
    ):
        if value != default:
            words.append(f"{word}={value}")
    return words


_FLAGS: dict[str, tuple[str, Any]] = {
    "fully_reshardable": ("sharding", "fully_reshardable"),
    "dp_reshardable": ("sharding", "dp_reshardable"),
    "default": ("sharding", None),
    "moe": ("moe", "sequential"),
    "moe-grouped": ("moe", "grouped"),
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
    "seed": "seed",
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
                next_step="the words are listed at the top of vime_optim/verify/case.py",
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

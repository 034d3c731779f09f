"""One verify case: what is trained, saved, loaded and compared. Plain data, no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from vime_optim.errors import VerifyError

OPTIMIZERS = ("hybrid", "fused", "torch")
SHARDINGS = ("fully_reshardable", "dp_reshardable")
DTYPES = ("fp32", "bf16", "fp16", "fp8")
ASYNC_MODES = ("off", "forked", "persistent")


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
    """The optimizer of one side: HybridDeviceOptimizer, FusedAdam, or torch's AdamW.

    `offload_fraction` matters to `hybrid` alone.
    """

    optimizer: str = "hybrid"
    offload_fraction: float = 1.0
    pao: bool = True
    exp_avg_dtype: str = "fp32"
    exp_avg_sq_dtype: str = "fp32"
    remainders: bool = True

    def __post_init__(self) -> None:
        one_of("the optimizer", self.optimizer, OPTIMIZERS)
        one_of("the dtype of exp_avg", self.exp_avg_dtype, DTYPES)
        one_of("the dtype of exp_avg_sq", self.exp_avg_sq_dtype, DTYPES)
        if not 0.0 <= self.offload_fraction <= 1.0:
            raise VerifyError(
                "the offload fraction is not within 0 and 1", got=self.offload_fraction
            )

    @property
    def keeps_remainders(self) -> bool:
        return self.optimizer == "fused" and self.pao and self.remainders

    def words(self) -> list[str]:
        words = [self.optimizer]
        if self.optimizer != "torch":
            words.append("pao" if self.pao else "nopao")
        if self.optimizer == "hybrid":
            words.append(f"f={self.offload_fraction:g}")
        words += [f"m={self.exp_avg_dtype}"] * (self.exp_avg_dtype != "fp32")
        words += [f"v={self.exp_avg_sq_dtype}"] * (self.exp_avg_sq_dtype != "fp32")
        return words + ["norem"] * (not self.remainders)


AnyCase = TypeVar("AnyCase", bound="Case")


@dataclass(frozen=True)
class Case:
    """What `vime-optim verify` can be asked for; tests derive what they need beyond it.

    `sharding` None: the caller asks for no type. `moe`: "none", or "sequential" experts.
    `install` False: without vime_optim.install(). `model_only`: load the weights alone.
    `via_training`: through megatron.training.checkpointing. Steps count from 1; with `num_steps` 0
    the save comes before the first one.
    """

    #: "module:class" that builds a rank's model and optimizer; see model.Builder.
    builder: ClassVar[str] = "vime_optim.verify.model:Builder"

    megatron: str = "0.16.1"
    backend: Backend = field(default_factory=Backend)
    load_backend: Backend = field(default_factory=Backend)
    layout: Layout = field(default_factory=Layout)
    load_layout: Layout = field(default_factory=Layout)
    sharding: str | None = "fully_reshardable"
    moe: str = "none"
    tied: bool = False
    one_bucket: bool = False
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
        one_of("the sharding type", self.sharding, (*SHARDINGS, None))
        one_of("the async mode", self.async_mode, ASYNC_MODES)
        one_of("the kind of MoE", self.moe, ("none", "sequential"))
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
    def not_compared(self) -> frozenset[str]:
        """Kinds of values that a load into another optimizer does not restore as they were."""
        return frozenset()

    @property
    def goes_on_alike(self) -> bool:
        """Whether the resumed run does what the first one did; else a third one is the measure."""
        return self.same_layout and self.same_backend and not self.model_only

    @property
    def has_moments(self) -> bool:
        """Whether the saved run took a step for certain."""
        return not self.model_only and self.num_steps > 0

    @property
    def name(self) -> str:
        """The case in words, of which most are left out where they say what is usual."""
        words = [self.megatron, *self.backend.words(), self.sharding or "default"]
        for size in ("dp", "tp", "pp", "ep"):
            here, there = getattr(self.layout, size), getattr(self.load_layout, size)
            if size == "dp" or (here, there) != (1, 1):
                words.append(f"{size}={here}" if here == there else f"{size}={here}->{there}")
        if not self.same_backend:
            words += [f"load:{word}" for word in self.load_backend.words()]
        words += self.model_words()
        words += ["model-only"] * self.model_only + ["training"] * self.via_training
        words += [f"async={self.async_mode}"] * (self.async_mode != "off")
        words += [f"steps={self.num_steps}"] * (self.num_steps != 3)
        words += [f"more={self.more_steps}"] * (self.more_steps != 2)
        words += [f"every={self.save_interval}"] * (self.save_interval is not None)
        return ",".join(words + ["stock"] * (not self.install))

    def model_words(self) -> list[str]:
        flags = {"moe": self.moe != "none", "tied": self.tied, "1bucket": self.one_bucket}
        return [word for word, is_on in flags.items() if is_on]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls: type[AnyCase], values: dict[str, Any]) -> AnyCase:
        """Inverse of `to_dict`; VerifyError when a field is missing or unknown."""
        values, usual = dict(values), cls()
        try:
            for key in ("backend", "load_backend", "layout", "load_layout"):
                values[key] = type(getattr(usual, key))(**values[key])
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise VerifyError(
                "the description of a verify case cannot be read",
                got=repr(error),
                next_step="save again with this version of vime_optim",
            ) from None

    def replace(self: AnyCase, **changes: Any) -> AnyCase:
        return dataclasses.replace(self, **changes)


def _check_layout(label: str, layout: Layout) -> None:
    sizes = dataclasses.asdict(layout)
    if min(sizes.values()) < 1:
        raise VerifyError(f"a parallel size of the {label} layout is below 1", got=sizes)
    if layout.dp % layout.ep:
        raise VerifyError(
            f"the expert-parallel size of the {label} layout must divide the data-parallel size",
            got=f"dp={layout.dp}, ep={layout.ep}",
        )


def one_of(what: str, got: object, allowed: tuple[object, ...]) -> None:
    """Raises:
    VerifyError: `got` is not among the values that are allowed.
    """
    if got not in allowed:
        raise VerifyError(f"{what} is unknown", got=got, expected=", ".join(map(str, allowed)))

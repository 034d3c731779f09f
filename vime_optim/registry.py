"""What a fix is: its targets (attributes of Megatron's modules), how each is wrapped and diagnosed.

installation.py puts fixes in force.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any, TypeVar

from vime_optim.errors import InstallError
from vime_optim.probe import describe_foreign_layer, has_patch, missing_parameters

Hit = Callable[[], None]
"""Called where a fault would have struck; counts for status()."""
Wrap = Callable[[Callable[..., Any], Hit], Callable[..., Any]]
"""Makes a replacement from the original function and the counter of its fix."""
Body = TypeVar("Body", bound=Callable[..., Any])
"""A replacement as `Fix.wraps` takes it: called with original, hit, and the call's arguments."""
Diagnose = Callable[[ModuleType, Any], "Diagnosis"]
"""Looks at a module and the function in it, and says whether the fix is needed there."""
On = Mapping[str, Hit]
"""Fixes in force that have a step in one function, by id."""
Call = dict[str, Any]
"""Arguments of one call of such a function, by name; a step may change them."""
Tell = Callable[[Callable[..., Any], On], Callable[..., Any]]
"""Makes the one replacement of a function in which several fixes have steps: `tell_save`."""


class Verdict(Enum):
    """What a diagnosis found."""

    NEEDED = "needed"
    FIXED_UPSTREAM = "fixed upstream"
    NOT_UNDERSTOOD = "not understood"
    WITHHELD = "withheld"
    """Needed, but another target of the fix is not understood, or a fix that it requires is off."""
    ABSENT = "absent"
    PENDING = "not imported yet"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Diagnosis:
    """A verdict and, where it needs one, the reason."""

    verdict: Verdict
    reason: str = ""


NEEDED = Diagnosis(Verdict.NEEDED)


def fixed_upstream(reason: str) -> Diagnosis:
    return Diagnosis(Verdict.FIXED_UPSTREAM, reason)


def not_understood(reason: str) -> Diagnosis:
    return Diagnosis(Verdict.NOT_UNDERSTOOD, reason)


def always(module: ModuleType, original: Any) -> Diagnosis:
    """A diagnosis: needed wherever the target is."""
    return NEEDED


def takes(*names: str) -> Diagnose:
    """A diagnosis: needed, as long as the target has these parameters."""

    def diagnose(module: ModuleType, original: Any) -> Diagnosis:
        reason = missing_parameters(original, *names)
        return not_understood(reason) if reason else NEEDED

    return diagnose


def unless_patched(patch: str, *names: str) -> Diagnose:
    """A diagnosis: needed, unless the target carries this patch of ours (patches/)."""

    def diagnose(module: ModuleType, original: Any) -> Diagnosis:
        if has_patch(original, patch):
            return fixed_upstream(f"patch {patch} is there")
        return takes("self", *names)(module, original)

    return diagnose


def left_to_others(diagnose: Diagnose = always) -> Diagnose:
    """A diagnosis: as given, but what somebody else's code replaced or wrapped is left alone."""

    def look(module: ModuleType, original: Any) -> Diagnosis:
        foreign = describe_foreign_layer(original, module)
        return fixed_upstream(f"left to {foreign}") if foreign else diagnose(module, original)

    return look


_OPTIONAL_PACKAGES = ("nvidia_resiliency_ext", "nemo_rl")
"""Packages that many jobs do without; what is not understood there concerns their users alone."""


@dataclass(frozen=True)
class Target:
    """One attribute of one Megatron module that a fix wraps.

    Attributes:
        module, name: where it is; `name` is a path in the module ('Class.method' or 'function').
        wrap: gets the original function and a hit counter, and returns the replacement. Where
            several fixes have a step in one function, each of them gives here the name of the same
            `Tell`, as 'module:name'. It holds the order of their steps.
        diagnose: gets the module and the original function, and probes the code, never the version.
        optional: may be absent from some releases.
    """

    module: str
    name: str
    wrap: Wrap | str
    diagnose: Diagnose = always
    optional: bool = False

    @property
    def package(self) -> str:
        """The package that the module is in, if a job may do without it; else '' (Megatron)."""
        package = self.module.partition(".")[0]
        return package if package in _OPTIONAL_PACKAGES else ""

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


def around(body: Callable[..., Any]) -> Wrap:
    """The wrap whose replacements call `body(original, hit, ...)` with the call's arguments."""

    def wrap(original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return body(original, hit, *args, **kwargs)

        return replacement

    return wrap


@dataclass(eq=False)
class Fix:
    """A named change that ends one or more faults. In force whole or not at all.

    One exception: targets in a package that a job may do without (nvidia-resiliency-ext) can be off
    alone. When those in Megatron are off, they are off, too.

    Attributes:
        targets: steps in functions that several fixes share; `wraps` adds what it decorates.
        requires: fixes without which this one is off.
        after: fixes whose wrappers lie below this one's, where both wrap the same attribute.
    """

    id: str
    faults: tuple[str, ...]
    summary: str
    targets: tuple[Target, ...] = ()
    requires: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    def wraps(
        self,
        place: str,
        names: str | tuple[str, ...],
        diagnose: Diagnose = always,
        optional: bool = False,
    ) -> Callable[[Body], Body]:
        """Replace functions of Megatron by the one that follows, which gets the original and the
        hit counter before the call's own arguments.

        Args:
            place: the module, or 'module:Class'.
            names: of the functions there; each is a target.
            diagnose, optional: of each target; see `Target`.
        """
        module, _, owner = place.partition(":")

        def add(body: Body) -> Body:
            for name in (names,) if isinstance(names, str) else names:
                path = f"{owner}.{name}" if owner else name
                self.targets += (Target(module, path, around(body), diagnose, optional),)
            return body

        return add


def select(fixes: Sequence[Fix], skip: Sequence[str], only: Sequence[str]) -> frozenset[str]:
    """Ids of the fixes that stay off, from fix ids or fault ids.

    Raises:
        InstallError: an id that names no fix and no fault.
    """
    by_name: dict[str, set[str]] = {}
    for fix in fixes:
        for name in (fix.id, *fix.faults):
            by_name.setdefault(name.lower(), set()).add(fix.id)
    for name in (*skip, *only):
        if name.lower() not in by_name:
            raise InstallError(
                f"unknown fix id {name!r}",
                expected=", ".join(sorted(by_name)),
                next_step="correct VIME_OPTIM_SKIP / VIME_OPTIM_ONLY or the argument;"
                " nothing was changed",
            )
    off = {fix_id for name in skip for fix_id in by_name[name.lower()]}
    if only:
        kept = {fix_id for name in only for fix_id in by_name[name.lower()]}
        off |= {fix.id for fix in fixes} - kept
    return frozenset(off)

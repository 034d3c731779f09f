"""Fixes and their targets: two-phase apply, exact undo, hit counters.

A `Fix` names the `Target`s (attributes of Megatron's modules) that it wraps. `Installation` first
resolves every target of the modules that are already imported, diagnoses each and checks for
conflicts; only then does it change anything, and all of it. Modules that are not imported yet are
handled the same way, one module at a time, by wrapt's post-import hooks.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any

import wrapt

from vime_optim.errors import ConflictError, InstallError, NotUnderstoodError
from vime_optim.probe import describe_foreign_layer, missing_parameters
from vime_optim.workarounds import MODULES as WORKAROUND_MODULES
from vime_optim.workarounds import known_as

Hit = Callable[[], None]
Wrap = Callable[[Callable[..., Any], Hit], Callable[..., Any]]


class Verdict(Enum):
    """What a diagnosis found."""

    NEEDED = "needed"
    FIXED_UPSTREAM = "fixed upstream"
    NOT_UNDERSTOOD = "not understood"
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


def takes(*names: str) -> Callable[[ModuleType, Any], Diagnosis]:
    """A diagnosis: needed, as long as the target has these parameters."""

    def diagnose(module: ModuleType, original: Any) -> Diagnosis:
        reason = missing_parameters(original, *names)
        return not_understood(reason) if reason else NEEDED

    return diagnose


@dataclass(frozen=True)
class Target:
    """One attribute of one Megatron module that a fix wraps.

    `name` is the attribute's path in the module ('Class.method' or 'function'). `wrap` gets the
    original function and a hit counter and returns the replacement. `diagnose` gets the module and
    the original function and probes the code, never the version string. An `optional` target may
    be absent from some releases.
    """

    module: str
    name: str
    wrap: Wrap
    diagnose: Callable[[ModuleType, Any], Diagnosis] = lambda module, original: NEEDED
    optional: bool = False

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True)
class Fix:
    """A named change that ends one or more faults."""

    id: str
    faults: tuple[str, ...]
    summary: str
    targets: tuple[Target, ...]


@dataclass
class Patch:
    """One attribute that was replaced, with what undoing it takes."""

    owner: Any
    attribute: str
    original: Any
    was_own: bool
    replacement: Any

    def undo(self) -> None:
        if self.was_own:
            setattr(self.owner, self.attribute, self.original)
        else:
            delattr(self.owner, self.attribute)

    @property
    def path(self) -> str:
        return f"{_owner_name(self.owner)}.{self.attribute}"

    def current(self) -> Any:
        return self.owner.__dict__.get(self.attribute)

    def is_intact(self) -> bool:
        return self.current() is self.replacement


@dataclass
class TargetState:
    """A target's diagnosis and the patches applied for it."""

    fix: Fix
    target: Target
    diagnosis: Diagnosis = field(default_factory=lambda: Diagnosis(Verdict.PENDING))
    patches: list[Patch] = field(default_factory=list)


@dataclass
class _Resolved:
    state: TargetState
    owner: Any
    attribute: str
    raw: Any
    diagnosis: Diagnosis


class Installation:
    """The fixes in force in this process."""

    def __init__(self, fixes: Sequence[Fix], skipped: Iterable[str], strict: bool) -> None:
        self.fixes = tuple(fixes)
        self.skipped = frozenset(skipped)
        self.strict = strict
        self.hits: dict[str, int] = {fix.id: 0 for fix in fixes}
        self.states = [TargetState(fix, target) for fix in fixes for target in fix.targets]
        self.active = False
        for state in self.states:
            if state.fix.id in self.skipped:
                state.diagnosis = Diagnosis(Verdict.SKIPPED)

    def apply(self) -> None:
        """Apply to every imported module, all or nothing, and wait for the others."""
        waiting = [s for s in self.states if s.diagnosis.verdict is Verdict.PENDING]
        loaded = [s for s in waiting if _is_loaded(s.target.module)]
        self._apply_states(loaded)
        self.active = True
        # One hook a module, so that the targets of one module are applied together.
        for module in sorted({s.target.module for s in waiting if s not in loaded}):
            wrapt.register_post_import_hook(functools.partial(self._on_import, module), module)
        for module in WORKAROUND_MODULES:
            wrapt.register_post_import_hook(self._after_workarounds, module)

    def _on_import(self, name: str, module: ModuleType) -> None:
        if not self.active:
            return
        self._apply_states(
            [
                s
                for s in self.states
                if s.target.module == name and s.diagnosis.verdict is Verdict.PENDING
            ]
        )

    def _apply_states(self, states: Sequence[TargetState]) -> None:
        resolved = [_resolve(state) for state in states]
        if self.strict:
            _raise_not_understood(resolved)
        for item in resolved:
            if item.diagnosis.verdict is Verdict.NEEDED:
                _check_conflict(item)
        applied: list[Patch] = []
        try:
            for item in resolved:
                if item.diagnosis.verdict is Verdict.NEEDED:
                    item.state.patches = _patch(item, self._hit_of(item.state.fix))
                    applied.extend(item.state.patches)
        except BaseException:
            for patch in reversed(applied):
                patch.undo()
            for item in resolved:
                item.state.patches = []
            raise
        for item in resolved:
            item.state.diagnosis = item.diagnosis

    def _after_workarounds(self, module: ModuleType) -> None:
        """A framework has just put known workarounds over our patches: ours go on top again."""
        if not self.active:
            return
        for stack in self._stacks().values():
            bottom, top = stack[0], stack[-1]
            current = top.current()
            if not top.is_intact() and known_as(_function_of(current), bottom.path):
                bottom.original, bottom.was_own = current, True
                setattr(top.owner, top.attribute, top.replacement)

    def _stacks(self) -> dict[tuple[int, str], list[Patch]]:
        """The patches of each attribute, the innermost first."""
        stacks: dict[tuple[int, str], list[Patch]] = {}
        for patch in (patch for state in self.states for patch in state.patches):
            stacks.setdefault((id(patch.owner), patch.attribute), []).append(patch)
        return stacks

    def laid_over(self) -> dict[str, str]:
        """Path of each attribute that somebody patched after us, and by what."""
        tops = (stack[-1] for stack in self._stacks().values())
        return {patch.path: _describe(patch.current()) for patch in tops if not patch.is_intact()}

    def _hit_of(self, fix: Fix) -> Hit:
        def hit() -> None:
            self.hits[fix.id] += 1

        return hit

    def remove(self) -> None:
        """Restore every attribute exactly as it was.

        Raises:
            ConflictError: somebody patched over one of ours; nothing was restored.
        """
        patches = [patch for state in self.states for patch in state.patches]
        for path, what in self.laid_over().items():
            raise ConflictError(
                "somebody patched over a method that vime_optim patched",
                where=path,
                got=what,
                next_step="undo that patch first, then call uninstall() again;"
                " nothing was restored",
            )
        self.active = False
        for patch in reversed(patches):
            patch.undo()
        _restore_later_aliases(patches)
        for state in self.states:
            state.patches = []
            if state.diagnosis.verdict is not Verdict.SKIPPED:
                state.diagnosis = Diagnosis(Verdict.PENDING)


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


def _is_loaded(name: str) -> bool:
    module = sys.modules.get(name)
    if module is None:
        return False
    return not getattr(getattr(module, "__spec__", None), "_initializing", False)


def _resolve(state: TargetState) -> _Resolved:
    target = state.target
    module = sys.modules[target.module]
    *path, attribute = target.name.split(".")
    owner: Any = module
    for part in path:
        owner = getattr(owner, part, None)
    raw = _raw_attribute(owner, attribute)
    if raw is None:
        verdict = Verdict.ABSENT if target.optional else Verdict.NOT_UNDERSTOOD
        diagnosis = Diagnosis(verdict, "not in this release")
        return _Resolved(state, owner, attribute, None, diagnosis)
    diagnosis = target.diagnose(module, _function_of(raw))
    return _Resolved(state, owner, attribute, raw, diagnosis)


def _raw_attribute(owner: Any, attribute: str) -> Any:
    """The attribute as stored (a staticmethod object, say), also when it is inherited."""
    if owner is None:
        return None
    for holder in getattr(owner, "__mro__", (owner,)):
        if attribute in vars(holder):
            return vars(holder)[attribute]
    return None


def _function_of(raw: Any) -> Any:
    return raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw


def _raise_not_understood(resolved: Sequence[_Resolved]) -> None:
    unknown = [r for r in resolved if r.diagnosis.verdict is Verdict.NOT_UNDERSTOOD]
    if unknown:
        raise NotUnderstoodError(
            "some targets are not understood and strict mode is on",
            where="; ".join(f"{r.state.fix.id}: {r.state.target}" for r in unknown),
            got="; ".join(r.diagnosis.reason for r in unknown),
            next_step="skip these fixes by VIME_OPTIM_SKIP, or run without strict;"
            " nothing was changed",
        )


def _check_conflict(item: _Resolved) -> None:
    current = _function_of(item.raw)
    if getattr(current, "__vime_optim__", False) or known_as(current, str(item.state.target)):
        return
    foreign = describe_foreign_layer(current, sys.modules[item.state.target.module])
    if foreign is not None:
        raise ConflictError(
            "somebody else already patched a method that a fix targets",
            where=f"{item.state.target} (fix {item.state.fix.id})",
            got=foreign,
            expected="the method that megatron-core defines",
            next_step="call vime_optim.install() before that patch, remove the patch, or skip the"
            f" fix with VIME_OPTIM_SKIP={item.state.fix.id}; nothing was changed",
        )


def _patch(item: _Resolved, hit: Hit) -> list[Patch]:
    # Read anew: an earlier target of this very round may have wrapped the same attribute.
    was_own = item.attribute in vars(item.owner)
    raw = vars(item.owner).get(item.attribute, item.raw)
    function = _function_of(raw)
    wrapped = item.state.target.wrap(function, hit)
    functools.update_wrapper(wrapped, function)
    wrapped.__vime_optim__ = item.state.fix.id  # type: ignore[attr-defined]
    replacement = type(raw)(wrapped) if isinstance(raw, (staticmethod, classmethod)) else wrapped
    patches = [Patch(item.owner, item.attribute, raw, was_own, replacement)]
    if isinstance(item.owner, ModuleType):
        patches += [
            Patch(module, item.attribute, raw, True, replacement)
            for module in _aliases(item.owner, item.attribute, raw)
        ]
    for patch in patches:
        setattr(patch.owner, patch.attribute, patch.replacement)
    return patches


def _aliases(owner: ModuleType, attribute: str, raw: Any) -> list[ModuleType]:
    """Modules that imported this very function by name; Megatron's packages re-export many."""
    found = []
    for module in list(sys.modules.values()):
        if module is owner or not isinstance(module, ModuleType):
            continue
        if vars(module).get(attribute) is raw:
            found.append(module)
    return found


def _restore_later_aliases(patches: Sequence[Patch]) -> None:
    """Give back the original to modules that imported a replacement by name after install()."""
    functions = [patch for patch in patches if isinstance(patch.owner, ModuleType)]
    original_of = {id(patch.replacement): patch.original for patch in functions}
    for attribute in {patch.attribute for patch in functions}:
        for module in list(sys.modules.values()):
            if not isinstance(module, ModuleType):
                continue
            found = held = vars(module).get(attribute)
            while id(held) in original_of:
                held = original_of[id(held)]
            if held is not found:
                setattr(module, attribute, held)


def _describe(value: Any) -> str:
    """A replacement of one of ours, for a report; a wrapper may still call ours."""
    function = _function_of(value)
    name = f"{getattr(function, '__module__', None)}.{getattr(function, '__qualname__', None)}"
    code = getattr(function, "__code__", None)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else repr(value)


def _owner_name(owner: Any) -> str:
    if isinstance(owner, ModuleType):
        return owner.__name__
    return f"{owner.__module__}.{owner.__qualname__}"

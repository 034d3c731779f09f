"""Puts fixes in force: two-phase apply, each fix as a whole, exact undo, hit counters.

`Installation` first resolves every target of the modules that are already imported, diagnoses each
and checks for conflicts; only then does it change anything, and all of it. Modules that are not
imported yet are handled the same way, one module at a time, when their import ends.

A fix is in force as a whole or not at all. If one of its targets is not understood, none is
patched. If the module of that target is imported late, the fix's other targets may be patched by
then; they get their originals back. A fix that requires one that is off is off, too. Rank 0 says
so once.
"""

from __future__ import annotations

import functools
import logging
import pkgutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from vime_optim import imports, log, patching
from vime_optim.errors import ConflictError, NotUnderstoodError
from vime_optim.patching import Patch, function_of
from vime_optim.probe import describe_foreign_layer
from vime_optim.registry import Diagnosis, Fix, Hit, On, Target, Verdict
from vime_optim.workarounds import MODULES as WORKAROUND_MODULES
from vime_optim.workarounds import known_as

Unit = tuple[str, str]
"""What is on or off as a whole: the id of a fix, and `Target.package` of the targets meant."""


@dataclass(eq=False)
class TargetState:
    """A target, what was found there, and the patches made for it.

    Attributes:
        owner, attribute, raw: `raw` is `vars(owner)[attribute]` or what a base class has for it.
    """

    fix: Fix
    target: Target
    diagnosis: Diagnosis = field(default_factory=lambda: Diagnosis(Verdict.PENDING))
    patches: list[Patch] = field(default_factory=list)
    owner: Any = None
    attribute: str = ""
    raw: Any = None

    @property
    def unit(self) -> Unit:
        return self.fix.id, self.target.package

    def look(self) -> Diagnosis:
        """Find the target in its module, which is imported, and diagnose it."""
        module = self.owner = sys.modules[self.target.module]
        *path, self.attribute = self.target.name.split(".")
        for part in path:
            self.owner = getattr(self.owner, part, None)
        self.raw = patching.raw_attribute(self.owner, self.attribute)
        if self.raw is None:
            verdict = Verdict.ABSENT if self.target.optional else Verdict.NOT_UNDERSTOOD
            return Diagnosis(verdict, "not in this release")
        return self.target.diagnose(module, function_of(self.raw))


class Installation:
    """The fixes in force in this process."""

    def __init__(self, fixes: Sequence[Fix], skipped: Iterable[str], strict: bool) -> None:
        self.fixes = {fix.id: fix for fix in fixes}
        self.skipped = frozenset(skipped)
        self.strict = strict
        self.hits: dict[str, int] = {fix.id: 0 for fix in fixes}
        by_height = sorted(fixes, key=lambda fix: self._height(fix.id))
        self.states = [TargetState(fix, target) for fix in by_height for target in fix.targets]
        """In the order in which wrappers are laid over one another, innermost first."""
        self.active = False
        self.odd: dict[Unit, str] = {}
        """Units with a target that is not understood, with the reason."""
        self._set_pending()

    def _height(self, fix: str) -> int:
        """How long the longest chain of `after` from a fix is; higher ones lie further out."""
        below = [self._height(other) for other in self.fixes[fix].after if other in self.fixes]
        return 1 + max(below, default=0)

    def _set_pending(self) -> None:
        for state in self.states:
            skipped = state.fix.id in self.skipped
            state.diagnosis = Diagnosis(Verdict.SKIPPED if skipped else Verdict.PENDING)
            state.patches = []

    def apply(self) -> None:
        """Apply to every imported module, all or nothing, and wait for the others."""
        waiting = [s for s in self.states if s.diagnosis.verdict is Verdict.PENDING]
        loaded = [s for s in waiting if imports.is_loaded(s.target.module)]
        self._apply_states(loaded)
        self.active = True
        # One hook a module, so that the targets of one module are applied together.
        for module in sorted({s.target.module for s in waiting if s not in loaded}):
            imports.when_imported(module, functools.partial(self._on_import, module))
        for module in WORKAROUND_MODULES:
            imports.when_imported(module, self._after_workarounds)

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
        """Patch what is needed of these targets, and take back what may not stay. All checks come
        first: when one raises, nothing has changed."""
        found = {state: state.look() for state in states}
        if self.strict:
            _raise_not_understood(found)
        odd = {**_not_understood(found), **self.odd}
        needed = [s for s, diagnosis in found.items() if diagnosis.verdict is Verdict.NEEDED]
        needed = [s for s in needed if not self._why_off(s.unit, odd)]
        for state in needed:
            _check_conflict(state)
        stale = [s for s in self.states if s.patches and self._why_off(s.unit, odd)]
        self._check_withdrawable(stale)
        self._patch(needed)
        self._withdraw(stale)
        for state, diagnosis in found.items():
            state.diagnosis = diagnosis
        self._withhold(odd)

    def _why_off(self, unit: Unit, odd: dict[Unit, str]) -> str | None:
        """Why a unit must be off (not understood, or it requires what is off), else None."""
        fix, package = unit
        reason = odd.get(unit) or odd.get((fix, ""))
        if reason is not None:
            return f"does not understand {reason}"
        for other in self.fixes[fix].requires:
            if other in self.skipped:
                return f"needs {other!r}, which is skipped"
            if other in self.fixes and self._why_off((other, package), odd):
                return f"needs {other!r}, which is off"
        return None

    def _withhold(self, odd: dict[Unit, str]) -> None:
        """Note which targets are needed and off with their fixes; say what is newly off."""
        before, self.odd = self.odd, odd
        for fix, package in dict.fromkeys(state.unit for state in self.states):
            reason = self._why_off((fix, package), odd)
            if reason is None:
                continue
            for state in self.states:
                if state.unit == (fix, package) and state.diagnosis.verdict is Verdict.NEEDED:
                    state.diagnosis = Diagnosis(Verdict.WITHHELD, f"with its fix, which {reason}")
            told = package and self._why_off((fix, ""), odd)  # the whole fix is off, and said so
            if not told and not self._why_off((fix, package), before):
                _say_off(self.fixes[fix], package, reason)

    def _patch(self, needed: Sequence[TargetState]) -> None:
        """All of them, or none when one raises."""
        try:
            for states in _by_place(needed):
                self._wrap(states)
        except BaseException:
            _undo(needed)
            raise

    def _wrap(self, states: Sequence[TargetState]) -> None:
        """Lay the wrappers of one attribute over it. Targets with the same `Tell` share one."""
        layers: dict[Any, list[TargetState]] = {}
        for state in states:
            told = isinstance(state.target.wrap, str)
            layers.setdefault(state.target.wrap if told else state, []).append(state)
        for layer in layers.values():
            on = {state.fix.id: self._hit_of(state.fix) for state in layer}
            make = functools.partial(_call_wrap, layer[0].target, on)
            patches = patching.replace(layer[0].owner, layer[0].attribute, make, " ".join(on))
            for state in layer:
                state.patches = patches

    def _withdraw(self, stale: Sequence[TargetState]) -> None:
        """Take back what earlier calls patched for these; other fixes stay in force."""
        for states in _by_place([state for state in self.states if state.patches]):
            if any(state in stale for state in states):
                _undo(states)
                self._wrap([state for state in states if state not in stale])

    def _check_withdrawable(self, stale: Sequence[TargetState]) -> None:
        """Raise where somebody else's patch lies over one that must be taken back."""
        paths = {patch.path for patch in _patches_of(stale)}
        for path, what in self.laid_over().items():
            if path in paths:
                raise NotUnderstoodError(
                    "a fix cannot be in force as a whole, nor be taken back: another patch lies"
                    " over one of its targets",
                    where=path,
                    got=what,
                    next_step="import all of Megatron before that patch is made, or skip with"
                    f" VIME_OPTIM_SKIP={','.join(sorted({state.fix.id for state in stale}))}",
                )

    def _after_workarounds(self, module: ModuleType) -> None:
        """A framework has just put known workarounds over our patches: ours go on top again."""
        if not self.active:
            return
        for stack in self._stacks().values():
            bottom, top = stack[0], stack[-1]
            current = top.current()
            if not top.is_intact() and known_as(function_of(current), bottom.path):
                bottom.original, bottom.was_own = current, True
                setattr(top.owner, top.attribute, top.replacement)

    def _stacks(self) -> dict[tuple[int, str], list[Patch]]:
        """The patches of each attribute, the innermost first."""
        stacks: dict[tuple[int, str], list[Patch]] = {}
        for patch in _patches_of(self.states):
            stacks.setdefault((id(patch.owner), patch.attribute), []).append(patch)
        return stacks

    def laid_over(self) -> dict[str, str]:
        """Path of each attribute that somebody patched after us, and by what."""
        tops = (stack[-1] for stack in self._stacks().values())
        return {
            patch.path: patching.describe(patch.current())
            for patch in tops
            if not patch.is_intact()
        }

    def _hit_of(self, fix: Fix) -> Hit:
        def hit() -> None:
            self.hits[fix.id] += 1

        return hit

    def remove(self) -> None:
        """Restore every attribute exactly as it was.

        Raises:
            ConflictError: somebody patched over one of ours; nothing was restored.
        """
        for path, what in self.laid_over().items():
            raise ConflictError(
                "somebody patched over a method that vime_optim patched",
                where=path,
                got=what,
                next_step="undo that patch first, then call uninstall() again;"
                " nothing was restored",
            )
        self.active = False
        self.odd.clear()
        patching.undo(_patches_of(self.states))
        self._set_pending()


def _patches_of(states: Iterable[TargetState]) -> list[Patch]:
    """In the order in which they were laid, each once: several fixes may share a wrapper."""
    return list({id(patch): patch for state in states for patch in state.patches}.values())


def _by_place(states: Iterable[TargetState]) -> Iterable[list[TargetState]]:
    """Those of the same attribute together."""
    places: dict[tuple[int, str], list[TargetState]] = {}
    for state in states:
        places.setdefault((id(state.owner), state.attribute), []).append(state)
    return places.values()


def _undo(states: Sequence[TargetState]) -> None:
    patching.undo(_patches_of(states))
    for state in states:
        state.patches = []


def _not_understood(found: Mapping[TargetState, Diagnosis]) -> dict[Unit, str]:
    odd: dict[Unit, str] = {}
    for state, diagnosis in found.items():
        if diagnosis.verdict is Verdict.NOT_UNDERSTOOD:
            odd.setdefault(state.unit, f"{state.target} ({diagnosis.reason})")
    return odd


def _raise_not_understood(found: Mapping[TargetState, Diagnosis]) -> None:
    unknown = {s: d for s, d in found.items() if d.verdict is Verdict.NOT_UNDERSTOOD}
    if unknown:
        raise NotUnderstoodError(
            "some targets are not understood and strict mode is on",
            where="; ".join(f"{state.fix.id}: {state.target}" for state in unknown),
            got="; ".join(diagnosis.reason for diagnosis in unknown.values()),
            next_step="skip these fixes by VIME_OPTIM_SKIP, or run without strict;"
            " nothing was changed",
        )


def _check_conflict(state: TargetState) -> None:
    current = function_of(state.raw)
    if getattr(current, "__vime_optim__", False) or known_as(current, str(state.target)):
        return
    foreign = describe_foreign_layer(current, sys.modules[state.target.module])
    if foreign is not None:
        raise ConflictError(
            "somebody else already patched a method that a fix targets",
            where=f"{state.target} (fix {state.fix.id})",
            got=foreign,
            expected="the method that megatron-core defines",
            next_step="call vime_optim.install() before that patch, remove the patch, or skip the"
            f" fix with VIME_OPTIM_SKIP={state.fix.id}; nothing was changed",
        )


def _call_wrap(target: Target, on: On, function: Any) -> Any:
    if isinstance(target.wrap, str):
        return pkgutil.resolve_name(target.wrap)(function, on)
    (hit,) = on.values()
    return target.wrap(function, hit)


def _say_off(fix: Fix, package: str, reason: str) -> None:
    where = f"for {package}" if package else "as a whole"
    log.say(
        logging.WARNING,
        f"vime_optim: fix {fix.id!r} is off {where}, and {', '.join(fix.faults)} may strike: it"
        f" {reason}. Take a megatron-core that `vime-optim doctor` knows, or a"
        f" newer vime_optim. VIME_OPTIM_STRICT=1 makes this an error, VIME_OPTIM_SKIP={fix.id}"
        " silences it",
    )

"""Puts fixes in force: two-phase apply, each fix as a whole, exact undo, hit counters.

`Installation` first resolves every target of the modules that are already imported, diagnoses each
and checks for conflicts; only then does it change anything, and all of it. Modules that are not
imported yet are handled the same way, one module at a time, when their import ends.

A fix is in force as a whole or not at all. With one target that is not understood none of its
targets is patched; where that target's module is imported later than others, those are given back
then. Rank 0 says so once.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from vime_optim import imports, log, patching
from vime_optim.errors import ConflictError, NotUnderstoodError
from vime_optim.patching import Patch, function_of
from vime_optim.probe import describe_foreign_layer
from vime_optim.registry import Diagnosis, Fix, Hit, Target, Verdict
from vime_optim.workarounds import MODULES as WORKAROUND_MODULES
from vime_optim.workarounds import known_as


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
        self.off: dict[str, str] = {}
        """Fixes with a target that is not understood, by id, with the reason."""
        for state in self.states:
            if state.fix.id in self.skipped:
                state.diagnosis = Diagnosis(Verdict.SKIPPED)

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
        resolved = [_resolve(state) for state in states]
        if self.strict:
            _raise_not_understood(resolved)
        off = self._newly_off(resolved)
        for item in resolved:
            if item.diagnosis.verdict is Verdict.NEEDED:
                item.diagnosis = self._as_a_whole(item.state.fix, item.diagnosis, off)
        needed = [item for item in resolved if item.diagnosis.verdict is Verdict.NEEDED]
        for item in needed:
            _check_conflict(item)
        self._check_withdrawable(off)
        self._patch(needed)
        for item in resolved:
            item.state.diagnosis = item.diagnosis
        self.off.update(off)
        self._withdraw(off)
        for fix in self.fixes:
            if fix.id in off:
                _say_off(fix, off[fix.id])

    def _patch(self, needed: Sequence[_Resolved]) -> None:
        """All of them, or none when one raises."""
        applied: list[Patch] = []
        try:
            for item in needed:
                item.state.patches = self._wrap(item.state, item.owner, item.attribute)
                applied += item.state.patches
        except BaseException:
            patching.undo(applied)
            for item in needed:
                item.state.patches = []
            raise

    def _wrap(self, state: TargetState, owner: Any, attribute: str) -> list[Patch]:
        make = functools.partial(_call_wrap, state.target, self._hit_of(state.fix))
        return patching.replace(owner, attribute, make, state.fix.id)

    def _newly_off(self, resolved: Sequence[_Resolved]) -> dict[str, str]:
        """Fixes that are off from now on, by id, with the reason."""
        off: dict[str, str] = {}
        for item in resolved:
            fix = item.state.fix.id
            if item.diagnosis.verdict is Verdict.NOT_UNDERSTOOD and fix not in self.off:
                off.setdefault(fix, f"{item.state.target} ({item.diagnosis.reason})")
        return off

    def _as_a_whole(self, fix: Fix, diagnosis: Diagnosis, off: dict[str, str]) -> Diagnosis:
        reason = off.get(fix.id) or self.off.get(fix.id)
        if reason is None:
            return diagnosis
        return Diagnosis(Verdict.WITHHELD, f"with its fix, which does not understand {reason}")

    def _check_withdrawable(self, off: dict[str, str]) -> None:
        """Patches of a fix that goes off must still be on top, or below others of ours."""
        paths = {p.path for s in self.states if s.fix.id in off for p in s.patches}
        for path, what in self.laid_over().items():
            if path in paths:
                raise NotUnderstoodError(
                    "a fix cannot be in force as a whole, nor be taken back: another patch lies"
                    " over one of its targets",
                    where=path,
                    got=what,
                    next_step="import all of Megatron before that patch is made, or skip with"
                    f" VIME_OPTIM_SKIP={','.join(sorted(off))}",
                )

    def _withdraw(self, off: dict[str, str]) -> None:
        """Give back what earlier rounds patched for these fixes; other fixes stay in force."""
        stale = [state for state in self.states if state.fix.id in off and state.patches]
        for state in stale:
            if state.patches:
                self._rebuild(state.patches[0], without=off)
        for state in stale:
            state.diagnosis = self._as_a_whole(state.fix, state.diagnosis, off)

    def _rebuild(self, patch: Patch, without: dict[str, str]) -> None:
        """Undo all layers of one attribute and make them anew, less those of some fixes."""
        place = (patch.owner, patch.attribute)
        layers = [
            state
            for state in self.states
            if state.patches and (state.patches[0].owner, state.patches[0].attribute) == place
        ]
        patching.undo([patch for state in layers for patch in state.patches])
        for state in layers:
            state.patches = []
        for state in layers:
            if state.fix.id not in without:
                state.patches = self._wrap(state, *place)

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
        for patch in (patch for state in self.states for patch in state.patches):
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
        self.off.clear()
        patching.undo(patches)
        for state in self.states:
            state.patches = []
            if state.diagnosis.verdict is not Verdict.SKIPPED:
                state.diagnosis = Diagnosis(Verdict.PENDING)


def _resolve(state: TargetState) -> _Resolved:
    target = state.target
    module = sys.modules[target.module]
    *path, attribute = target.name.split(".")
    owner: Any = module
    for part in path:
        owner = getattr(owner, part, None)
    raw = patching.raw_attribute(owner, attribute)
    if raw is None:
        verdict = Verdict.ABSENT if target.optional else Verdict.NOT_UNDERSTOOD
        diagnosis = Diagnosis(verdict, "not in this release")
        return _Resolved(state, owner, attribute, None, diagnosis)
    diagnosis = target.diagnose(module, function_of(raw))
    return _Resolved(state, owner, attribute, raw, diagnosis)


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
    current = function_of(item.raw)
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


def _call_wrap(target: Target, hit: Hit, function: Any) -> Any:
    return target.wrap(function, hit)


def _say_off(fix: Fix, reason: str) -> None:
    log.say(
        logging.WARNING,
        f"vime_optim: fix {fix.id!r} is off as a whole, and {', '.join(fix.faults)} may strike: it"
        f" does not understand {reason}. Take a megatron-core that `vime-optim doctor` knows, or a"
        f" newer vime_optim. VIME_OPTIM_STRICT=1 makes this an error, VIME_OPTIM_SKIP={fix.id}"
        " silences it",
    )

"""install(), uninstall() and status(): one Installation per process."""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import Any

import vime_optim
from vime_optim import compat, log, settings
from vime_optim.counters import counters
from vime_optim.errors import SettingsError
from vime_optim.installation import Installation
from vime_optim.registry import Verdict, select
from vime_optim.report import NOT_FOUND, Report, Row

_lock = threading.RLock()
_installation: Installation | None = None


def install(**arguments: Any) -> Report:
    """See `vime_optim.install`."""
    global _installation
    with _lock:
        if _installation is not None:
            _require_same(_installation, arguments)
            return status()
        chosen = settings.Settings.load(**arguments)
        from vime_optim.fixes import FIXES

        skipped = select(FIXES, chosen.skip, chosen.only)
        megatron = compat.find_megatron()
        if megatron is not None:
            compat.require_supported(megatron)
        installation = Installation(FIXES, skipped, chosen.strict)
        previous = settings.current()
        settings.activate(chosen)
        try:
            installation.apply()
        except BaseException:
            settings.activate(previous)
            raise
        _installation = installation
        report = status()
        _announce(report, chosen)
        return report


def _require_same(installation: Installation, arguments: dict[str, Any]) -> None:
    """A second install() may ask for nothing, or for what is in force.

    Raises:
        SettingsError: it asks for something else.
    """
    from vime_optim.fixes import FIXES

    in_force = settings.current()
    asked = settings.Settings.load({}, **arguments)
    given = [name for name, value in arguments.items() if value is not None]
    other = [name for name in given if getattr(asked, name) != getattr(in_force, name)]
    if {"skip", "only"} & set(given):
        skip = asked.skip if "skip" in given else in_force.skip
        only = asked.only if "only" in given else in_force.only
        if select(FIXES, skip, only) == installation.skipped:
            other = [name for name in other if name not in ("skip", "only")]
    if other:
        raise SettingsError(
            "install() was called before with other settings, which are in force",
            got=", ".join(f"{name}={getattr(asked, name)!r}" for name in other),
            expected=", ".join(f"{name}={getattr(in_force, name)!r}" for name in other),
            next_step="call install() once, or uninstall() first; nothing was changed",
        )


def _announce(report: Report, chosen: settings.Settings) -> None:
    """One line a job: what is in force, or that there is nothing to put it on yet."""
    if chosen.verbose:
        log.speak_up()
    for name in settings.unknown_variables(os.environ):
        log.say(logging.WARNING, f"vime_optim: nothing reads the variable {name}")
    if not report.found:
        log.say(
            logging.WARNING,
            f"vime_optim {report.version}: megatron-core is not found in this environment; nothing"
            " is patched unless it is imported later (`vime-optim doctor` says what to do)",
        )
        return
    sharding = {
        "enforce": "fully_reshardable enforced",
        "error": "anything but fully_reshardable is refused",
        "off": "sharding as the job asks",
    }[chosen.sharding]
    log.say(logging.INFO, f"{report.summary()}; {sharding}")


def uninstall() -> None:
    """See `vime_optim.uninstall`."""
    global _installation
    with _lock:
        if _installation is None:
            return
        if "vime_optim.async_save.callers" in sys.modules:  # else nothing was ever saved
            sys.modules["vime_optim.async_save.callers"].finish_all()
        _installation.remove()
        _installation = None
        settings.activate(settings.Settings())
        counters.clear()
        log.be_quiet()


def status() -> Report:
    """See `vime_optim.status`. Before install() it diagnoses nothing and lists every fix."""
    from vime_optim.fixes import FIXES

    installation = _installation or Installation(FIXES, (), strict=False)
    megatron = compat.find_megatron()
    laid_over = installation.laid_over()
    rows = tuple(
        Row(
            fix=state.fix.id,
            faults=state.fix.faults,
            target=str(state.target),
            verdict=state.diagnosis.verdict.value,
            applied=bool(state.patches),
            hits=installation.hits[state.fix.id],
            reason=state.diagnosis.reason if state.diagnosis.verdict is not Verdict.PENDING else "",
            laid_over=next((laid_over[p.path] for p in state.patches if p.path in laid_over), ""),
        )
        for state in installation.states
    )
    return Report(
        installed=_installation is not None,
        version=vime_optim.__version__,
        megatron=str(megatron) if megatron else NOT_FOUND,
        rows=rows,
        counters=dict(counters),
    )


def import_targets() -> dict[str, str]:
    """Import every module that a fix patches, for a look at all of them.

    Returns:
        The errors by module, for those that cannot be imported. Left out are modules that not every
        megatron-core has, and megatron.training, which parses no arguments here.
    """
    import importlib

    from vime_optim.fixes import FIXES

    failed: dict[str, str] = {}
    targets = [target for fix in FIXES for target in fix.targets]
    for module in sorted({target.module for target in targets}):
        if module.startswith("megatron.training"):
            continue
        try:
            importlib.import_module(module)
        except Exception as error:
            if not any(target.optional for target in targets if target.module == module):
                failed[module] = f"{type(error).__name__}: {error}"
    return failed

"""Exact resume for Megatron's distributed optimizer.

    import vime_optim
    vime_optim.install()

Importing this package does nothing and loads neither torch nor megatron.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vime_optim.report import Report

__version__ = "0.2.0"
__all__ = ["__version__", "check_optimizer", "install", "status", "uninstall"]


def install(
    *,
    skip: str | tuple[str, ...] | None = None,
    only: str | tuple[str, ...] | None = None,
    strict: bool | None = None,
    sharding: str | None = None,
    verbose: bool | None = None,
    **settings: Any,
) -> Report:
    """Put the fixes in force in this process. Calling it again changes nothing.

    Works before, while or after megatron is imported; modules that are not wholly imported yet are
    patched when they are. Either every applicable fix is applied or, when this raises, none. A fix
    with a target that is not understood is off as a whole, and rank 0 warns.

    Args:
        skip: fix or fault ids that stay off (also VIME_OPTIM_SKIP).
        only: fix or fault ids to apply; all others stay off (also VIME_OPTIM_ONLY).
        strict: raise when a target is not understood (also VIME_OPTIM_STRICT).
        sharding: 'enforce' | 'error' | 'off' (also VIME_OPTIM_SHARDING).
        verbose: rank 0 says on stderr what was done (also VIME_OPTIM_VERBOSE). Without it one INFO
            line goes to the logger "vime_optim".
        **settings: any other field of `vime_optim.settings.Settings`.

    Returns:
        The same report as `status()`.

    Raises:
        SettingsError: a setting that is unknown or has no meaning, a VIME_OPTIM_ variable that
            looks like a misspelt setting, or a second call that asks for other settings.
        InstallError: an unknown fix id, or a megatron-core older than 0.15.
        ConflictError: somebody else patched a method that a fix targets.
        NotUnderstoodError: only with strict.
    """
    from vime_optim import installer

    return installer.install(
        skip=skip, only=only, strict=strict, sharding=sharding, verbose=verbose, **settings
    )


def uninstall() -> None:
    """Restore every attribute of Megatron exactly as it was. Does nothing when not installed.

    Raises:
        ConflictError: somebody patched over one of our patches; nothing was restored.
    """
    from vime_optim import installer

    installer.uninstall()


def status() -> Report:
    """What is in force: a table when printed, data by its attributes and `to_dict()`."""
    from vime_optim import installer

    return installer.status()


def check_optimizer(optimizer: Any) -> None:
    """Raise OptimizerStateError when a restored optimizer's state is not sound.

    Checks, for every parameter: no two states share storage, none holds more bytes than it has,
    and dtype, device and pinning are what the optimizer would have made itself.
    """
    from vime_optim.optimizer.soundness import check_optimizer as check

    check(optimizer)

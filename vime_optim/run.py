"""Runs a training script with the fixes in force, for those who will not touch the script:

    torchrun --nproc-per-node 8 -m vime_optim.run pretrain_gpt.py --its --arguments
    torchrun --nproc-per-node 8 -m vime_optim.run -m package.train --its --arguments

The script sees its own `sys.argv`, `__name__ == "__main__"` and its folder first on `sys.path`, as
if Python had been given it. A process that it spawns imports the script itself, as always, and has
no fixes: checkpoint writers need none.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from vime_optim.errors import SettingsError

_USAGE = "python -m vime_optim.run [-m] SCRIPT [its arguments]"


def main(arguments: list[str] | None = None) -> None:
    """Install, then run.

    Raises:
        SettingsError: no script was named, or it is not there.
    """
    as_module, given = parse(sys.argv[1:] if arguments is None else arguments)
    from vime_optim import install

    # Python put the working directory first on the path for `-m`; a script expects its own folder
    # there, and install() has to look for megatron-core where the script will.
    if not as_module and not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(Path(given[0]).resolve().parent)
    install()
    sys.argv = given
    if as_module:
        runpy.run_module(given[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(given[0], run_name="__main__")


def parse(arguments: Sequence[str]) -> tuple[bool, list[str]]:
    """Whether a module was named, and the words from its or the script's name on."""
    as_module = list(arguments[:1]) == ["-m"]
    given = list(arguments[1:] if as_module else arguments)
    if not given or given[0].startswith("-"):
        raise SettingsError(
            "no script to run", got=" ".join(given) or "no arguments", expected=_USAGE
        )
    if not as_module and not Path(given[0]).exists():
        raise SettingsError(
            "the script to run is not there",
            where=given[0],
            expected=_USAGE,
            next_step="give its path, or `-m` and the name of a module",
        )
    return as_module, given


if __name__ == "__main__":
    try:
        parse(sys.argv[1:])
    except SettingsError as error:
        raise SystemExit(f"vime_optim.run: {error}") from None
    main()

"""The one logger of the library, "vime_optim", and lines that a job says once, not once a rank."""

from __future__ import annotations

import logging
import os
import sys

from vime_optim.errors import current_rank

logger = logging.getLogger("vime_optim")

#: Set by launchers; in this order, since torchrun inside a Slurm step knows the rank better.
_RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_handler: logging.Handler | None = None


def is_first_rank() -> bool:
    """Whether this process is rank 0, or knows of no ranks."""
    rank = current_rank()
    if rank is not None:
        return rank == 0
    known = [os.environ[name] for name in _RANK_VARIABLES if os.environ.get(name, "").isdigit()]
    return not known or int(known[0]) == 0


def say(level: int, text: str) -> None:
    """One line to the logger, on rank 0 alone."""
    if is_first_rank():
        logger.log(level, text)


def speak_up() -> None:
    """Send INFO lines to stderr where the program has set up no logging of its own."""
    global _handler
    if _handler is not None or logger.hasHandlers():
        return
    _handler = logging.StreamHandler(sys.stderr)
    _handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(_handler)
    logger.setLevel(logging.INFO)


def be_quiet() -> None:
    """Undo `speak_up`."""
    global _handler
    if _handler is not None:
        logger.removeHandler(_handler)
        logger.setLevel(logging.NOTSET)
        _handler = None

"""Every error that vime_optim raises.

An error says what happened, where, what was found against what was expected, and what to do next.
The parts are kept as attributes, so that a caller can act on them without parsing text.
"""

from __future__ import annotations

import os
import re


class VimeOptimError(Exception):
    """Base of all errors raised by this library.

    Args:
        what: one sentence on what went wrong.
        where: the file, parameter, method or key it went wrong at.
        got: what was found.
        expected: what was needed instead.
        next_step: what the reader can do about it.
        rank: the global rank; found from the process group or RANK when left out.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        got: object = None,
        expected: object = None,
        next_step: str | None = None,
        rank: int | None = None,
    ) -> None:
        self.what = what
        self.where = where
        self.got = got
        self.expected = expected
        self.next_step = next_step
        self.rank = current_rank() if rank is None else rank
        super().__init__(self._render())

    def _render(self) -> str:
        lines = [self.what if self.rank is None else f"[rank {self.rank}] {self.what}"]
        for label, value in (
            ("where", self.where),
            ("got", self.got),
            ("expected", self.expected),
            ("next", self.next_step),
        ):
            if value is not None:
                lines.append(f"  {label + ':':<10}{value}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions cross process borders in torch's collectives; keyword-only arguments would not.
        return (rebuild, (type(self), dict(self.__dict__)))


def rebuild(cls: type[VimeOptimError], attributes: dict[str, object]) -> VimeOptimError:
    """An error from its attributes: what pickle calls."""
    error = cls.__new__(cls)
    error.__dict__.update(attributes)
    Exception.__init__(error, error._render())
    return error


def one_line(error: BaseException) -> str:
    """Type and first line of another library's exception, without torch's advice to switch
    weights_only off, which would run a file's code."""
    text = str(error)
    if "Weights only load failed" in text:
        named = re.search(r"GLOBAL (\S+)", text)
        text = f"it names {named[1]}, which is not allowed" if named else "a class is not allowed"
    first = text.splitlines()[0] if text else ""
    return f"{type(error).__name__}: {first}"[:300]


def current_rank() -> int | None:
    """Global rank of this process, or None outside a distributed job. Never imports torch."""
    import sys

    torch = sys.modules.get("torch")
    if torch is not None:
        distributed = getattr(torch, "distributed", None)
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_rank())
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdigit() else None


class InstallError(VimeOptimError):
    """install() or uninstall() could not be done whole; nothing was changed."""


class ConflictError(InstallError):
    """Somebody else patched a method that a fix targets, or patched over ours."""


class NotUnderstoodError(InstallError):
    """A fix's target does not look like anything this release of vime_optim knows."""


class SettingsError(VimeOptimError):
    """An argument or environment variable has a value that means nothing."""


class OptimizerStateError(VimeOptimError):
    """Optimizer state is not what it must be: aliased, oversized, missing or of a wrong type."""


class CheckpointError(VimeOptimError):
    """A checkpoint is missing, incomplete, corrupt, foreign or of another model."""


class PlanError(VimeOptimError):
    """A save or load plan does not cover what it must, or differs between ranks."""


class WriterError(VimeOptimError):
    """A checkpoint writer died or could not write."""


class VerifyError(VimeOptimError):
    """A verify job could not be run (not: it ran and found a difference)."""


def printable(text: str) -> str:
    """Text without control characters: names in a checkpoint may hold terminal escapes."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)

"""The same outcome on every rank: all go on, or all raise.

A rank that fails alone between two collectives of Megatron leaves the others waiting in the next
one, or returning success. So a save or load is one `Operation` here: before each collective of
Megatron the ranks compare one small vector (`point`), and a rank that leaves by an exception takes
part once more, with its error, before it raises. The others are, or soon will be, at such a point.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from vime_optim import collectives
from vime_optim.errors import VimeOptimError, WriterError

_VALUES = 3
"""Numbers that ranks may add up while they agree. One length for all, as a rank that failed
answers whatever the others compare at that moment."""

_thread = threading.local()


def agree(
    error: str | None,
    what: str,
    where: str,
    group: Any = None,
    kind: type[VimeOptimError] = WriterError,
    next_step: str | None = None,
    values: Sequence[int] = (),
) -> list[int]:
    """Collective: raise `kind` on every rank when any rank has an error; costs four integers.

    Args:
        error: this rank's error, None when it has none.
        what, where, next_step: parts of the exception; the errors go into its `got`.
        group: the ranks that take part; None: all.
        values: at most three numbers to add up, modulo 2**64.

    Returns:
        The sums of `values` over the ranks, as signed 64-bit integers.
    """
    if not torch.distributed.is_initialized():
        if error is not None:
            raise _left(kind(what, where=where, got=error, next_step=next_step))
        return [_signed(value) for value in values]
    vector = [int(error is not None), *map(_signed, values), *([0] * (_VALUES - len(values)))]
    try:
        failed, *sums = collectives.added(vector, group)
        if not failed:
            return sums[: len(values)]
        own = None if error is None else (torch.distributed.get_rank(), error)
        errors = collectives.gathered(own, group)
    except BaseException as broken:
        _left(broken, is_broken=True)  # a rank is gone: there is nobody to agree with any more
        raise
    raise _left(kind(what, where=where, got=_summary(e for e in errors if e), next_step=next_step))


def _signed(value: int) -> int:
    """`value` modulo 2**64, as a tensor of int64 holds it."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _left(error: BaseException, is_broken: bool = False) -> BaseException:
    """Note in the operation of this thread that all ranks leave it."""
    operation = current()
    if operation is not None:
        operation.error, operation.is_broken = error, is_broken
    return error


def _summary(errors: Iterable[tuple[int, str]]) -> str:
    """'rank 1: ...; rank 3: ...', equal texts together."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in errors:
        ranks_of.setdefault(text, []).append(rank)
    parts = []
    for text, ranks in ranks_of.items():
        shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        parts.append(f"rank{'s' if len(ranks) > 1 else ''} {shown}: {text}")
    return "; ".join(parts)


def describe(error: BaseException) -> str:
    """One line on an exception, with what was found and the file it concerns."""
    text = error.what if isinstance(error, VimeOptimError) else f"{type(error).__name__}: {error}"
    got = getattr(error, "got", None) if isinstance(error, VimeOptimError) else None
    if got is not None:
        text = f"{text}: {got}"
    where = getattr(error, "where", None) or getattr(error, "filename", None)
    return text if not where or str(where) in text else f"{text} ({where})"


class Operation:
    """One save or load in which all ranks take part.

    Args:
        what: what the exception of the other ranks says.
        where: the checkpoint directory.
        kind: class of that exception.
        next_step: what it advises.

    Attributes:
        error: what the ranks agreed on when one had failed; None as long as none has.
        is_broken: a rank could not be reached any more.
    """

    error: BaseException | None = None
    is_broken = False

    def __init__(
        self, what: str, where: str, kind: type[VimeOptimError], next_step: str | None = None
    ) -> None:
        self.what = what
        self.where = where
        self.kind = kind
        self.next_step = next_step

    def check(self, error: str | None = None, values: Sequence[int] = ()) -> list[int]:
        """Collective over all ranks; see `agree`."""
        return agree(error, self.what, self.where, None, self.kind, self.next_step, values)


@contextmanager
def together(operation: Operation | None) -> Iterator[None]:
    """All ranks leave this block by an exception, or none does.

    A rank that fails keeps its own exception; the others raise the operation's, which names it.
    None: what is called in this block takes no part in the operation around it.
    """
    outer = current()
    _thread.operation = operation
    try:
        yield
    except BaseException as error:
        if operation is None:
            raise
        if operation.error is None:  # this rank's own failure, of which the others do not know
            with suppress(BaseException):
                operation.check(describe(error))
            raise
        if error is not operation.error and not isinstance(error, KeyboardInterrupt):
            raise operation.error from error  # torch wraps what passes through it
        raise
    finally:
        _thread.operation = outer


def current() -> Operation | None:
    """The operation of this thread."""
    found: Operation | None = getattr(_thread, "operation", None)
    return found


def point() -> None:
    """Collective within an operation, nothing outside of one: raise when some rank has failed."""
    operation = current()
    if operation is not None:
        operation.check()

"""Many pickled objects of one form, made at once from columns of integers.

Pickling a quarter of a million small objects one by one takes ten seconds and more. Their pickles
differ in a few numbers only, so one sample is pickled, the numbers are found in it, and numpy
writes all of them. What is written is a pickle as any other: nothing is needed to read it.
"""

from __future__ import annotations

import io
import itertools
import pickle
import pickletools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from vime_optim.files.cover import Ints

_PROTOCOL = 2  # without frames, so that pickles can be put together
_MOST_INT = (1 << 31) - 1

Make = Callable[[Sequence[Any]], Any]
"""Builds an object from one value of each column, or for each gap."""


class Writer:
    """One pickle, made of parts. Names, classes and what else many of them refer to is said once,
    before all parts, and has a number in the memo of whoever reads the pickle.

    Args:
        others: objects of any kind and size, to be said first.

    Attributes:
        of_others: for each of them, opcodes that put it on the stack of the unpickler.
    """

    def __init__(self, others: Sequence[Any] = ()) -> None:
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, _PROTOCOL)
        pickler.dump(list(others))
        memo = pickler.memo.copy()
        self._first = buffer.getvalue()[:-1] + pickle.POP  # without STOP
        self.of_others = [get(memo[id(o)][0]) if id(o) in memo else plain(o) for o in others]
        self._taken = len(memo)
        self._numbers: dict[bytes, int] = {}

    def number(self, value: Any) -> int:
        """The number of an object that parts refer to; equal pickles are one object."""
        return self._number_of(plain(value))

    def _number_of(self, code: bytes) -> int:
        return self._numbers.setdefault(code, self._taken + len(self._numbers))

    def know(self, like: Sequence[Any]) -> None:
        """Number what the pickles of such objects name, before all else: low numbers are short."""
        for each in like:
            list(self._forms(each, ()))

    def said(self) -> bytes:
        """The first part: what all others refer to. To be asked for when they have been made."""
        return self._first + b"".join(
            code + pickle.LONG_BINPUT + number.to_bytes(4, "little") + pickle.POP
            for code, number in self._numbers.items()
        )

    def around(self, make: Make, gaps: int) -> list[bytes]:
        """The pickle of an object without some values: the bytes before, between and after them."""
        parts, next_gap = [b""], 0
        samples = [_reference(gap) for gap in range(gaps)]
        for code, gap in self._forms(make(samples), samples):
            if gap is None:
                parts[-1] += code
                continue
            if gap != next_gap:
                raise ValueError("the pickle of a sample has its values in another order")
            parts.append(b"")
            next_gap += 1
        if next_gap != gaps:
            raise ValueError("a value is not found in the pickle of a sample")
        return parts

    def rows(self, make: Make, columns: Sequence[Column], count: int) -> Any:
        """The pickles of `count` objects of one form: uint8 [count, bytes of one]."""
        sample, places = b"", []
        samples = [column.sample(number) for number, column in enumerate(columns)]
        for code, at in self._forms(make(samples), samples):
            if at is not None:
                places.append((len(sample) + (2 if code[:1] == pickle.LONG1 else 1), at))
            sample += code
        if {column for _, column in places} != set(range(len(columns))):
            raise ValueError("a column is not found in the pickle of a sample")
        rows = np.tile(np.frombuffer(sample, dtype=np.uint8), (count, 1))
        for place, column in places:
            value = columns[column].as_bytes()
            rows[:, place : place + value.shape[1]] = value
        return rows

    def _forms(self, value: Any, samples: Sequence[Any]) -> Iterator[tuple[bytes, int | None]]:
        """Opcodes of an object, each with the number of the sample that it is, if it is one."""
        number_of = {sample: number for number, sample in enumerate(samples)}
        for name, argument, code in _opcodes(plain(value)):
            sample = number_of.get(argument)
            if name == "GLOBAL" or (name == "BINUNICODE" and sample is None):
                yield get(self._number_of(code)), None
            else:
                yield _long_get(0) if name == "BINUNICODE" else code, sample


def plain(value: Any) -> bytes:
    """Opcodes that leave a value on the stack of the unpickler, and use no memo."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, _PROTOCOL)
    pickler.fast = True
    pickler.dump(value)
    return buffer.getvalue()[2:-1]  # without PROTO and STOP


def get(number: int) -> bytes:
    """Puts an object that was said on the stack of the unpickler."""
    return pickle.BINGET + bytes((number,)) if number < 256 else _long_get(number)


def _long_get(number: int) -> bytes:
    return pickle.LONG_BINGET + number.to_bytes(4, "little")


def _opcodes(data: bytes) -> Iterator[tuple[str, Any, bytes]]:
    """Name, argument, and the bytes of both."""
    found = list(pickletools.genops(data + pickle.STOP))
    for (opcode, argument, begin), (_, _, end) in itertools.pairwise(found):
        yield opcode.name, argument, data[begin:end]


def _reference(number: int) -> str:
    """Stands for an object of the memo in a sample, where nothing else is called so."""
    return f"\0{number}"


class Column:
    """The numbers that one place of a form takes.

    Args:
        values: int64 [objects], at least 0.
        said: they are numbers of the memo, and their objects are meant.
    """

    def __init__(self, values: Ints, said: bool = False) -> None:
        self.values = values
        self.said = said
        self.wide = not said and bool((values > _MOST_INT).any())

    def sample(self, number: int) -> Any:
        """A value that nothing else in a sample has."""
        if self.said:
            return _reference(number)
        return ((0x7F3A5C1E << 32) if self.wide else 0x7F3A5C1E) + number

    def as_bytes(self) -> Any:
        kind = np.dtype("<i8" if self.wide else "<i4")
        raw = np.ascontiguousarray(self.values, dtype=kind).view(np.uint8)
        return raw.reshape(-1, kind.itemsize)

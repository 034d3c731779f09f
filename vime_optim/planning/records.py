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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from vime_optim.files.cover import Ints

_PROTOCOL = 2  # without frames, so that pickles can be put together
_MOST_INT = (1 << 31) - 1


class Writer:
    """One pickle, made of parts that refer to what was said before.

    The memo of a pickle numbers the objects in it. What many parts refer to is said first, once;
    then comes the frame, and what goes into its gaps refers to what was said alone.
    """

    def __init__(self) -> None:
        self._buffer = io.BytesIO()
        self._pickler = pickle.Pickler(self._buffer, _PROTOCOL)
        self._kept: list[Any] = []  # the memo goes by address
        self._first: dict[int, tuple[int, Any]] = {}
        """The memo after the first `say`."""

    def say(self, values: Sequence[Any]) -> tuple[bytes, Ints]:
        """Objects that later parts refer to. What `make` of a form uses (classes, names of
        attributes) is in those of the first call, few: its memo is copied for each form.

        Returns:
            The part of the pickle, and each one's number in the memo.
        """
        data = self._pickle(list(values)) + pickle.POP
        memo = dict(self._pickler.memo.copy())
        self._first = self._first or memo
        return data, np.array([memo[id(value)][0] for value in values], dtype=np.int64)

    def frame(self, value: Any, gaps: Sequence[Any]) -> list[bytes]:
        """The pickle of a value without some objects in it, which were said first: the bytes
        before, between and behind them. To be asked for before any form.

        Its other attributes may be large (the plans of all ranks): they are not looked through."""
        others = [held for held in vars(value).values() if not any(held is gap for gap in gaps)]
        said = self._pickle(others) + pickle.POP
        head, *behind = _cut(_opcodes(self._pickle(value)), [self._first[id(g)][0] for g in gaps])
        return [said + head, *behind]

    def around(self, make: Callable[[Sequence[Any]], Any], gaps: int) -> list[bytes]:
        """As `frame`, of what `make` builds from so many values, for what comes many times."""
        samples = [_said(number) for number in range(gaps)]
        bare = self._bare(self._with(make, samples), samples)
        return _cut(bare, [sample.number for sample in samples])

    def form(
        self, make: Callable[[Sequence[Any]], Any], columns: Sequence[Column], count: int
    ) -> Form:
        """The form of the `count` objects that `make` builds from one value of each column."""
        samples = [column.sample(number) for number, column in enumerate(columns)]
        bare = self._bare(self._with(make, samples), samples)
        return Form(bare, samples, columns, count)

    def _bare(self, data: bytes, samples: Sequence[Any]) -> Iterator[_Opcode]:
        """A part that may be repeated: it adds nothing to the memo."""
        known = {sample.number for sample in samples if type(sample) is _Said}
        for name, argument, code in _opcodes(data):
            gets = name in ("BINGET", "LONG_BINGET")
            if gets and argument >= len(self._first) and argument not in known:
                raise ValueError(f"a part refers to what was not said, number {argument}")
            if name not in ("BINPUT", "LONG_BINPUT"):
                yield name, argument, code

    def _with(self, make: Callable[[Sequence[Any]], Any], samples: Sequence[Any]) -> bytes:
        said = {id(s): (s.number, s) for s in samples if type(s) is _Said}
        self._pickler.memo = {**self._first, **said}
        return self._pickle(make(samples))

    def _pickle(self, value: Any) -> bytes:
        """Bytes that leave `value` on the stack of the unpickler."""
        self._kept.append(value)
        self._buffer.seek(0)
        self._buffer.truncate()
        self._pickler.dump(value)
        return self._buffer.getvalue()[2:-1]  # without PROTO and STOP


def get(number: int) -> bytes:
    """Puts an object that was said on the stack of the unpickler."""
    return pickle.LONG_BINGET + number.to_bytes(4, "little")


_Opcode = tuple[str, Any, bytes]
"""Name, argument, and the bytes of both."""


def _opcodes(data: bytes) -> Iterator[_Opcode]:
    found = list(pickletools.genops(data + pickle.STOP))
    for (opcode, argument, begin), (_, _, end) in itertools.pairwise(found):
        yield opcode.name, argument, data[begin:end]


def _cut(opcodes: Iterable[_Opcode], gaps: Sequence[int]) -> list[bytes]:
    """The bytes around the objects of the memo that have these numbers."""
    parts = [b""]
    for name, argument, code in opcodes:
        if name in ("BINGET", "LONG_BINGET") and argument in gaps:
            if argument != gaps[len(parts) - 1]:
                raise ValueError("the pickle of a sample has its values in another order")
            parts.append(b"")
        else:
            parts[-1] += code
    if len(parts) != len(gaps) + 1:
        raise ValueError("a value is not found in the pickle of a sample")
    return parts


class _Said(str):
    """Stands for an object of the memo in a sample."""

    number: int


def _said(number: int) -> _Said:
    said = _Said()
    said.number = 0x7E000000 + number
    return said


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
        if self.wide:
            return (0x7F3A5C1E << 32) + number
        if not self.said:
            return 0x7F3A5C1E + number
        return _said(number)

    def as_bytes(self) -> Any:
        kind = np.dtype("<i8" if self.wide else "<i4")
        raw = np.ascontiguousarray(self.values, dtype=kind).view(np.uint8)
        return raw.reshape(-1, kind.itemsize)


class Form:
    """The bytes of one sample, and where in them each column's value stands."""

    def __init__(
        self,
        sample: Iterable[_Opcode],
        values: Sequence[Any],
        columns: Sequence[Column],
        count: int,
    ) -> None:
        self._columns, self._count = columns, count
        wanted = {getattr(value, "number", value): at for at, value in enumerate(values)}
        kept = b""
        self._places: list[tuple[int, int]] = []
        """(place, column), for each time that a column's value is in the sample."""
        for name, argument, code in sample:
            if name in ("BININT", "LONG1", "LONG_BINGET") and argument in wanted:
                self._places.append((len(kept) + (2 if name == "LONG1" else 1), wanted[argument]))
            kept += code
        if {column for _, column in self._places} != set(range(len(columns))):
            raise ValueError("a column is not found in the pickle of a sample")
        self._sample = np.frombuffer(kept, dtype=np.uint8)

    def of_all(self) -> Any:
        """uint8 [objects, bytes of one]."""
        rows = np.tile(self._sample, (self._count, 1))
        for place, number in self._places:
            value = self._columns[number].as_bytes()
            rows[:, place : place + value.shape[1]] = value
        return rows

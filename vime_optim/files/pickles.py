"""Unpickles by a closed list of names, after a look at what the pickle may cost.

A pickle is a program for a small stack machine. In `audit` that machine runs on numbers alone:
every object is the work of hashing it, nothing is built and nothing is called. So a pickle is
refused that declares sizes it does not hold, hangs a dict (a tuple of the same tuple twice, 64
deep, has 2**64 leaves to hash), grows the memo past its own length, or changes a class. What is
left may be given to Python's fast unpickler: its memory and time are then a multiple of the
pickle's own length.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

_MOST_KEY = 2000
"""Leaves of one key of a dict. Real ones: strings, and (name, offsets, number) of DCP."""

_CAP = 1 << 40  # weights are not counted beyond this, or a bomb would make them long numbers


class UnknownName(pickle.UnpicklingError):
    """A pickle asks to import what is not on the list."""


def loads(
    data: bytes,
    names: Mapping[str, Any],
    persistent_load: Callable[[Any], Any] | None = None,
) -> Any:
    """What `pickle.loads` gives, with `names` (dotted) for all that may be imported.

    Raises:
        UnknownName: another name; nothing was called with it.
        pickle.UnpicklingError: as `audit`.
        Exception: whatever comes of a damaged pickle: TypeError from a constructor, struct.error.
    """
    audit(data)
    unpickler = _Unpickler(io.BytesIO(data))
    unpickler.names = names
    if persistent_load is not None:
        unpickler.persistent_load = persistent_load  # type: ignore[method-assign]
    return unpickler.load()


class _Unpickler(pickle.Unpickler):
    names: Mapping[str, Any]

    def find_class(self, module: str, name: str) -> Any:
        dotted = f"{module.replace('__builtin__', 'builtins')}.{name}"
        if dotted not in self.names:
            raise UnknownName(dotted[:200])
        return self.names[dotted]


def audit(data: bytes) -> None:
    """Refuse a pickle that costs more than a multiple of its length, or does odd things.

    Raises:
        pickle.UnpicklingError: says what is wrong.
    """
    try:
        _Machine(data).run()
    except (IndexError, ValueError):  # from a list, from bytes.index
        raise pickle.UnpicklingError(
            "broken pickle: it ends early, or its stack is empty"
        ) from None


_PLAIN, _CLASS = 0, 1  # objects 0 and 1: a value that is cheap to hash, and any name's value

# What opcodes do here that push a plain value: the bytes of their argument, or the bytes in which
# the argument's length stands before it.
_FIXED = {
    b"N": 0, b"\x88": 0, b"\x89": 0, b")": 0, b"K": 1, b"M": 2, b"J": 4, b"G": 8,
}  # fmt: skip
_COUNTED = {
    b"\x8c": 1, b"X": 4, b"\x8d": 8, b"C": 1, b"B": 4, b"\x8e": 8, b"U": 1, b"T": 4,
    b"\x8a": 1, b"\x8b": 4,
}  # fmt: skip

_MARKED = -1  # all objects since the last mark
_NEW, _INTO, _CALL, _GONE = range(4)
"""What becomes of the objects that an opcode takes: a new object that holds them, parts of the one
below them, the arguments of a call (which may hash them: a set, an OrderedDict), or nothing."""


_HASHED = {
    b"s": slice(0, None, 2), b"u": slice(0, None, 2), b"\x90": slice(None), b"\x91": slice(None),
}  # fmt: skip
"""Which of the objects that an opcode takes are keys of a dict or members of a set."""

_TAKES = {
    b"}": (0, _NEW), b"]": (0, _NEW), b"\x8f": (0, _NEW), b"\x85": (1, _NEW), b"\x86": (2, _NEW),
    b"\x87": (3, _NEW), b"t": (_MARKED, _NEW), b"\x91": (_MARKED, _NEW), b"Q": (1, _NEW),
    b"a": (1, _INTO), b"e": (_MARKED, _INTO), b"b": (1, _INTO), b"s": (2, _INTO),
    b"u": (_MARKED, _INTO), b"\x90": (_MARKED, _INTO),
    b"R": (2, _CALL), b"\x81": (2, _CALL), b"\x92": (3, _CALL),
    b"0": (1, _GONE), b"1": (_MARKED, _GONE),
}  # fmt: skip
"""How many objects an opcode takes from the stack, and what becomes of them."""

_OPS = {code: (*row, _HASHED.get(code)) for code, row in _TAKES.items()}


def _by_code(table: Mapping[bytes, Any], other: Any) -> list[Any]:
    return [table.get(bytes([code]), other) for code in range(256)]


class _Machine:
    """The stack machine. Objects are numbers; `weights` says what hashing each would take."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.weights = [1, 1]
        self.stack: list[int] = []
        self.marks: list[int] = []
        self.memo: list[int] = []
        self.work_left = 64 * len(data) + 100_000

    def run(self) -> None:
        data, stack, memo = self.data, self.stack, self.memo
        push, remember = stack.append, memo.append
        fixed, counted, ops = _by_code(_FIXED, -1), _by_code(_COUNTED, 0), _by_code(_OPS, None)
        at = 0
        while True:
            code = data[at]  # an argument that reaches past the end is found here
            at += 1
            if code == 0x94:  # MEMOIZE
                remember(stack[-1])
            elif code == 0x6A:  # LONG_BINGET
                push(memo[int.from_bytes(data[at : at + 4], "little")])
                at += 4
            elif code == 0x68:  # BINGET
                push(memo[data[at]])
                at += 1
            elif (size := fixed[code]) >= 0:
                push(_PLAIN)
                at += size
            elif size := counted[code]:
                at += size + int.from_bytes(data[at : at + size], "little")
                push(_PLAIN)
            elif code == 0x28:  # MARK
                self.marks.append(len(stack))
            elif op := ops[code]:
                takes, what, hashed = op
                self.apply(takes, what, hashed)
            elif code == 0x2E:  # STOP
                break
            else:
                at = self.apply_rare(code, at)
        if len(stack) != 1 or self.marks:
            raise pickle.UnpicklingError("broken pickle: it leaves more than one object")

    def apply(self, takes: int, what: int, hashed: slice | None) -> None:
        """An opcode that takes objects from the stack, and has no argument."""
        weights, stack = self.weights, self.stack
        start = self.marks.pop() if takes == _MARKED else len(stack) - takes
        if start < 0:
            raise IndexError
        weight, taken = 0, stack[start:]
        if taken:
            del stack[start:]
            for number in taken:
                weight += weights[number]
        if hashed is not None:
            for number in taken[hashed]:
                self.spend(weights[number], _MOST_KEY)
        elif what == _CALL:
            self.spend(weight, self.work_left)
        if what == _INTO:
            target = stack[-1]
            if target == _CLASS:
                raise pickle.UnpicklingError("it changes a class, or what else a name stands for")
            if target != _PLAIN and weights[target] < _CAP:
                weights[target] += weight
        elif what != _GONE:
            stack.append(len(weights))
            weights.append(1 + weight if weight < _CAP else _CAP)

    def spend(self, work: int, most: int) -> None:
        self.work_left -= work
        if work > most or self.work_left < 0:
            raise pickle.UnpicklingError("what takes too long to hash: nested tuples")

    def apply_rare(self, code: int, at: int) -> int:
        """One of the other opcodes. Returns the place after its argument."""
        opcode, stack = bytes([code]), self.stack
        if opcode == b"\x80":  # PROTO
            return at + 1
        if opcode == b"\x95":  # FRAME
            return at + 8
        if opcode == b"2":  # DUP
            stack.append(stack[-1])
        elif opcode == b"\x93":  # STACK_GLOBAL
            stack.pop()
            stack[-1] = _CLASS
        elif opcode == b"c":  # GLOBAL
            at = self.data.index(b"\n", self.data.index(b"\n", at) + 1) + 1
            stack.append(_CLASS)
        elif opcode in (b"q", b"r"):  # BINPUT, LONG_BINPUT
            size = 1 if opcode == b"q" else 4
            number = int.from_bytes(self.data[at : at + size], "little")
            if number > len(self.memo):
                raise pickle.UnpicklingError(
                    f"memo number {number} where {len(self.memo)} comes next"
                )
            self.memo[number : number + 1] = [stack[-1]]
            at += size
        else:
            raise pickle.UnpicklingError(f"opcode {opcode!r} has no place here")
        return at

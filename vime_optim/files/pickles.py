"""Looks through a pickle before anything unpickles it: what it may cost, not what it means.

A pickle is a program for a small stack machine. Here that machine runs on numbers alone: every
object is the work of hashing it, nothing is built and nothing is called. So a pickle is refused
that declares sizes it does not hold, hangs a dict (a tuple of the same tuple twice, 64 deep, has
2**64 leaves to hash), grows the memo past its own length, or changes a class. What is left may be
given to Python's fast unpickler with a closed list of names: its memory and time are then a
multiple of the pickle's own length.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable

_MOST_KEY = 2000
"""Leaves of one key of a dict. Real ones: strings, and (name, offsets, number) of DCP."""

_CAP = 1 << 40  # weights are not counted beyond this, or a bomb would make them long numbers

# What an opcode does here. Sizes are those of its argument in bytes.
_PUSH = {
    b"N": 0, b"\x88": 0, b"\x89": 0, b")": 0, b"K": 1, b"M": 2, b"J": 4, b"G": 8,
}  # fmt: skip
_PUSH_COUNTED = {  # the argument begins with its length, of so many bytes
    b"\x8c": 1, b"X": 4, b"\x8d": 8, b"C": 1, b"B": 4, b"\x8e": 8, b"U": 1, b"T": 4,
    b"\x8a": 1, b"\x8b": 4,
}  # fmt: skip
_FIXED: list[int] = [-1] * 256
_COUNTED: list[int] = [0] * 256
for _code, _size in _PUSH.items():
    _FIXED[_code[0]] = _size
for _code, _size in _PUSH_COUNTED.items():
    _COUNTED[_code[0]] = _size

_PLAIN, _CLASS = 0, 1  # objects 0 and 1: a value that is cheap to hash, and any name's value


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
        fixed, counted, rare = _FIXED, _COUNTED, _RARE
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
            elif code == 0x2E:  # STOP
                break
            else:
                step = rare[code]
                if step is None:
                    raise pickle.UnpicklingError(f"opcode {bytes([code])!r} has no place here")
                at = step(self, at)
        if len(stack) != 1 or self.marks:
            raise pickle.UnpicklingError("broken pickle: it leaves more than one object")

    def new(self, weight: int) -> None:
        self.stack.append(len(self.weights))
        self.weights.append(weight if weight < _CAP else _CAP)

    def taken(self) -> list[int]:
        """The objects since the last mark, taken from the stack."""
        start = self.marks.pop()
        found = self.stack[start:]
        del self.stack[start:]
        return found

    def sum_of(self, objects: list[int]) -> int:
        weights = self.weights
        return sum([weights[number] for number in objects])

    def add(self, target: int, weight: int) -> None:
        if target > _CLASS:
            self.weights[target] = min(_CAP, self.weights[target] + weight)

    def hashed(self, number: int) -> None:
        weight = self.weights[number]
        self.work_left -= weight
        if weight > _MOST_KEY or self.work_left < 0:
            raise pickle.UnpicklingError("a key that takes too long to hash: nested tuples")


_Step = Callable[[_Machine, int], int]
"""One opcode: takes the place after it, returns the place after its argument."""


def _mark(m: _Machine, at: int) -> int:
    m.marks.append(len(m.stack))
    return at


def _container(m: _Machine, at: int) -> int:
    m.new(1)
    return at


def _tuple(m: _Machine, at: int) -> int:
    m.new(1 + m.sum_of(m.taken()))
    return at


def _short_tuple(count: int) -> _Step:
    def step(m: _Machine, at: int) -> int:
        parts = m.stack[-count:]
        if len(parts) < count:
            raise IndexError
        del m.stack[-count:]
        m.new(1 + m.sum_of(parts))
        return at

    return step


def _append(m: _Machine, at: int) -> int:
    item = m.stack.pop()
    m.add(m.stack[-1], m.weights[item])
    return at


def _appends(m: _Machine, at: int) -> int:
    items = m.taken()
    m.add(m.stack[-1], m.sum_of(items))
    return at


def _set_item(m: _Machine, at: int) -> int:
    value, key = m.stack.pop(), m.stack.pop()
    m.hashed(key)
    m.add(m.stack[-1], m.weights[key] + m.weights[value])
    return at


def _set_items(m: _Machine, at: int) -> int:
    items = m.taken()
    for key in items[::2]:
        m.hashed(key)
    m.add(m.stack[-1], m.sum_of(items))
    return at


def _add_items(m: _Machine, at: int) -> int:
    items = m.taken()
    for item in items:
        m.hashed(item)
    m.add(m.stack[-1], m.sum_of(items))
    return at


def _frozenset(m: _Machine, at: int) -> int:
    items = m.taken()
    for item in items:
        m.hashed(item)
    m.new(1 + m.sum_of(items))
    return at


def _call(m: _Machine, at: int) -> int:
    """REDUCE and NEWOBJ: what is called may hash its arguments (a set, an OrderedDict)."""
    arguments = m.stack.pop()
    m.stack.pop()
    m.work_left -= m.weights[arguments]
    if m.work_left < 0:
        raise pickle.UnpicklingError("arguments that take too long to hash: nested tuples")
    m.new(1 + m.weights[arguments])
    return at


def _call_with_names(m: _Machine, at: int) -> int:
    m.stack.pop()
    return _call(m, at)


def _build(m: _Machine, at: int) -> int:
    state = m.stack.pop()
    target = m.stack[-1]
    if target == _CLASS:
        raise pickle.UnpicklingError("it changes a class, or what else a name stands for")
    m.add(target, m.weights[state])
    return at


def _persistent(m: _Machine, at: int) -> int:
    m.stack.pop()
    m.new(1)
    return at


def _global(m: _Machine, at: int) -> int:
    for _ in range(2):
        at = m.data.index(b"\n", at) + 1
    m.stack.append(_CLASS)
    return at


def _stack_global(m: _Machine, at: int) -> int:
    m.stack.pop()
    m.stack.pop()
    m.stack.append(_CLASS)
    return at


def _put(size: int) -> _Step:
    def step(m: _Machine, at: int) -> int:
        number = int.from_bytes(m.data[at : at + size], "little")
        if number > len(m.memo):
            raise pickle.UnpicklingError(f"memo number {number} where {len(m.memo)} comes next")
        if number == len(m.memo):
            m.memo.append(m.stack[-1])
        else:
            m.memo[number] = m.stack[-1]
        return at + size

    return step


def _pop(m: _Machine, at: int) -> int:
    m.stack.pop()
    return at


def _pop_mark(m: _Machine, at: int) -> int:
    m.taken()
    return at


def _dup(m: _Machine, at: int) -> int:
    m.stack.append(m.stack[-1])
    return at


_RARE: list[_Step | None] = [None] * 256
for _code, _step in {
    b"(": _mark, b"}": _container, b"]": _container, b"\x8f": _container,
    b"t": _tuple, b"\x85": _short_tuple(1), b"\x86": _short_tuple(2), b"\x87": _short_tuple(3),
    b"a": _append, b"e": _appends, b"s": _set_item, b"u": _set_items, b"\x90": _add_items,
    b"\x91": _frozenset, b"R": _call, b"\x81": _call, b"\x92": _call_with_names, b"b": _build,
    b"Q": _persistent, b"c": _global, b"\x93": _stack_global, b"q": _put(1), b"r": _put(4),
    b"0": _pop, b"1": _pop_mark, b"2": _dup,
    b"\x80": lambda m, at: at + 1, b"\x95": lambda m, at: at + 8,
}.items():  # fmt: skip
    _RARE[_code[0]] = _step

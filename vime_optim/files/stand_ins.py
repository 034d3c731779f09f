"""Inert stand-ins for the classes that a checkpoint names.

A pickle holds classes by name. None of those classes is needed to know what is in a checkpoint, so
none is imported: each name becomes a stand-in that only remembers what it was called with. Written
again, a stand-in becomes the very name that it came from, so that Megatron finds its own class.
"""

from __future__ import annotations

import pickle
import re
import reprlib
from functools import cache
from typing import Any, ClassVar

import numpy as np

_PLAIN_DTYPE = re.compile(r"[<>|=]?([biufc?]\d{0,2}|[SU]\d{1,6})")


class InertMeta(type):
    """Type of the stand-in classes; lets a pickler tell them from real classes."""

    dotted_name: str


class Inert(metaclass=InertMeta):
    """An instance of a class that was not imported.

    Attributes:
        args: positional arguments that the pickle built it from (an enum's value, for example).
        state: its attributes, or None.
    """

    dotted_name = ""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = None

    def __new__(cls, *args: Any) -> Inert:
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __reduce__(self) -> tuple[Any, ...]:
        if self.state is None:
            return type(self), self.args
        return type(self), self.args, self.state

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Inert) or type(other).dotted_name != type(self).dotted_name:
            return NotImplemented
        return bool(self.args == other.args and self.state == other.state)

    def __hash__(self) -> int:
        return hash(type(self).dotted_name)

    def __repr__(self) -> str:
        return f"<inert {type(self).dotted_name}{reprlib.repr(self.args)}>"


@cache
def inert_class(dotted_name: str) -> InertMeta:
    """The one stand-in class for `dotted_name`; the same object at every call."""
    name = dotted_name.rpartition(".")[2]
    return InertMeta(name, (Inert,), {"dotted_name": dotted_name})


def is_inert_class(value: object) -> bool:
    """True for a stand-in *class* (what F9 leaves in param groups), not for an instance."""
    return isinstance(value, InertMeta)


class NumpyDtype:
    """A numpy dtype by its code; only plain numbers and strings, never objects."""

    def __init__(self, code: Any = "", *_flags: Any) -> None:
        if not isinstance(code, str) or not _PLAIN_DTYPE.fullmatch(code):
            raise pickle.UnpicklingError(f"numpy dtype {code!r} is not a plain one")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        order = state[1]
        if order in ("<", ">", "=", "|") and not any(state[2:5]):
            self.dtype = self.dtype.newbyteorder(order)
        else:
            raise pickle.UnpicklingError("numpy dtype with fields")


class NumpyArray:
    """An array on its way: `finish` makes it real once its size has been checked."""

    def __init__(self, *_args: Any) -> None:
        self.value: np.ndarray[Any, Any] = np.empty(0, dtype=np.uint8)

    def __setstate__(self, state: Any) -> None:
        _version, shape, kind, fortran, raw = state
        if not isinstance(kind, NumpyDtype) or not isinstance(raw, bytes):
            raise pickle.UnpicklingError("numpy array of objects")
        flat = np.frombuffer(raw, dtype=kind.dtype).copy()
        self.value = flat.reshape(shape, order="F" if fortran else "C")


def numpy_scalar(kind: Any, raw: Any = b"") -> Any:
    """A numpy scalar from its bytes."""
    if not isinstance(kind, NumpyDtype) or not isinstance(raw, bytes):
        raise pickle.UnpicklingError("numpy scalar of an object")
    values = np.frombuffer(raw, dtype=kind.dtype)
    if values.size != 1:
        raise pickle.UnpicklingError("numpy scalar of a wrong size")
    return values[0]


class NamePickler(pickle._Pickler):
    """Writes an inert class as the name that it stands for, without importing it.

    Python's own pickler imports a class to prove that it can be found again; the classes here are
    Megatron's, which need not be installed.
    """

    dispatch: ClassVar[dict[type, Any]] = dict(pickle._Pickler.dispatch)

    def save_inert(self, obj: InertMeta) -> None:
        module, _, name = obj.dotted_name.rpartition(".")
        self.write(pickle.GLOBAL + f"{module}\n{name}\n".encode())  # type: ignore[attr-defined]
        self.memoize(obj)  # type: ignore[attr-defined]

    dispatch[InertMeta] = save_inert

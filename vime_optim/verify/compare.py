"""Bit-exact comparison of captured training states.

The captures of all ranks are put together by name into global tensors, so that runs with other
data, tensor, pipeline or expert parallel sizes can be compared, bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vime_optim.errors import VerifyError
from vime_optim.tools.bits import bits

REPLICAS_DISAGREE = "replicas disagree"
"""In a difference: copies of one value, on several ranks of one run, are not the same."""


@dataclass(frozen=True)
class Difference:
    """One name that differs. `count` of `numel` elements; `max_abs` None where it means nothing."""

    kind: str
    name: str
    what: str
    count: int = 1
    numel: int = 1
    max_abs: float | None = None

    def __str__(self) -> str:
        text = f"{self.kind} {self.name}: {self.what}"
        return text if self.max_abs is None else f"{text}, max abs {self.max_abs:.3g}"


@dataclass
class State:
    """A whole training state by (kind, name). `conflicts`: replicas that disagree."""

    tensors: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    values: dict[tuple[str, str], Any] = field(default_factory=dict)
    conflicts: list[Difference] = field(default_factory=list)

    def kinds(self) -> list[str]:
        return sorted({kind for kind, _ in (*self.tensors, *self.values)})


def load_state(folder: Path) -> State:
    """Put the captures of all ranks in a folder together.

    Raises:
        VerifyError: the folder holds no capture.
    """
    paths = sorted(folder.glob("rank*.pt"), key=lambda path: int(path.stem[4:]))
    if not paths:
        raise VerifyError("there is no captured state", where=str(folder))
    return assemble([torch.load(path, weights_only=True) for path in paths])


def assemble(records: Iterable[dict[str, Any]]) -> State:
    """One State from the records of all ranks (see capture.py)."""
    state = State()
    covered: dict[tuple[str, str], torch.Tensor] = {}
    for rank, record in enumerate(records):
        for key, value in record["scalars"].items():
            _put_value(state, ("job", key), value)
        for key, value in record.get("kinds", {}).items():
            # Of all ranks together: one may hold no part of an optimizer's host or device half.
            seen = state.values.get(("kinds", key), [])
            state.values["kinds", key] = sorted({*seen, *value})
        if rank == 0:
            state.tensors.update({("rng", key): value for key, value in record["rng"].items()})
        for piece in record["pieces"]:
            _place_piece(state, covered, piece)
    for key, mask in covered.items():
        missing = int((~mask).sum())
        if missing:
            what = f"{missing} of {mask.numel()} elements are held by no rank"
            state.conflicts.append(Difference(*key, what, missing, mask.numel()))
    return state


def _put_value(state: State, key: tuple[str, str], value: Any) -> None:
    if key[0] == "step" and not value and not state.values.get(key):
        value = None  # no counter counts from 0
    if key in state.values and not _same_value(state.values[key], value):
        what = f"replicas disagree: {state.values[key]!r} and {value!r}"
        state.conflicts.append(Difference(*key, what))
    state.values.setdefault(key, value)


def _same_value(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return a.hex() == b.hex()
    return bool(a == b)


def _place_piece(
    state: State, covered: dict[tuple[str, str], torch.Tensor], piece: dict[str, Any]
) -> None:
    for part in piece["place"]:
        inside = (part["index"] >= piece["start"]) & (part["index"] < piece["end"])
        where = global_index(part)[inside]
        source = part["index"][inside] - piece["start"]
        for kind, scalar in piece["scalars"].items():
            _put_value(state, (kind, part["key"]), scalar)
        for kind, flat in piece["tensors"].items():
            key = (kind, part["key"])
            if kind.endswith(".scale"):
                continue  # belongs to a rank's shard, not to the global tensor
            values = _with_scale(piece, kind, flat)[source]
            if key not in state.tensors:
                state.tensors[key] = torch.zeros(part["global_shape"], dtype=values.dtype)
                covered[key] = torch.zeros(part["global_shape"], dtype=torch.bool)
            _write(state, covered[key], key, where, values)


def _with_scale(piece: dict[str, Any], kind: str, flat: torch.Tensor) -> torch.Tensor:
    """The stored bits, or where a scale belongs to them the float32 values they stand for."""
    scale = piece["tensors"].get(f"{kind}.scale")
    if flat.dtype == torch.uint8:  # FusedAdam's 8-bit states hold float8 bits
        flat = flat.view(torch.float8_e4m3fn)
    return flat if scale is None or kind == "master" else flat.float() * scale


def global_index(part: dict[str, Any]) -> torch.Tensor:
    """Flat indices within the global tensor of the part's elements, in its own order."""
    index = torch.zeros((), dtype=torch.int64)
    for offset, size, length in zip(
        part["offset"], part["shape"], part["global_shape"], strict=True
    ):
        index = index.unsqueeze(-1) * length + torch.arange(offset, offset + size)
    return index.reshape(-1)


def _write(
    state: State,
    mask: torch.Tensor,
    key: tuple[str, str],
    where: torch.Tensor,
    values: torch.Tensor,
) -> None:
    target, seen = state.tensors[key].view(-1), mask.view(-1)
    if target.dtype != values.dtype:
        what = f"ranks hold it as {target.dtype} and as {values.dtype}"
        state.conflicts.append(Difference(*key, what))
        return
    again = seen[where]
    count = int((bits(target[where]) != bits(values))[again].sum())
    if count:
        what = f"{REPLICAS_DISAGREE} in {count} elements"
        state.conflicts.append(Difference(*key, what, count, target.numel()))
    target[where] = values
    seen[where] = True


def compare(
    expected: State,
    got: State,
    *,
    skip: Iterable[str] = (),
    round_to_got: bool = False,
    tied_masters: bool = False,
) -> list[Difference]:
    """Everything that is not bit for bit the same, in order of kind and name.

    Args:
        skip: kinds to leave out.
        round_to_got: where dtypes differ, compare after the one rounding of expected to got's.
        tied_masters: compare after `round_tied_masters` of the expected masters.
    """
    left_out = set(skip)
    found = [d for d in (*expected.conflicts, *got.conflicts) if d.kind not in left_out]
    for key in sorted({*expected.tensors, *got.tensors}):
        if key[0] in left_out:
            continue
        a, b = expected.tensors.get(key), got.tensors.get(key)
        if a is None or b is None:
            found.append(Difference(*key, f"only in the {'resumed' if a is None else 'first'} run"))
        else:
            if tied_masters and key[0] == "master" and a.dtype == torch.float32:
                a = round_tied_masters(a)
            found += _compare_tensors(key, a, b, round_to_got)
    for key in sorted({*expected.values, *got.values}):
        if key[0] not in left_out:
            found += _compare_values(key, expected.values, got.values)
    return found


def drop_inert(expected: State, got: State) -> bool:
    """Leave zeros out of `got` where `expected` was never stepped: a load makes inert state.

    Returns:
        True when `expected` holds no state beside parameters.
    """
    held = set(expected.kinds())
    if "exp_avg" in held:
        return False
    for key in [key for key in got.tensors if key[0] not in held]:
        if not int(bits(got.tensors[key]).count_nonzero()):
            del got.tensors[key]
    for key, value in [(key, value) for key, value in got.values.items() if key[0] == "step"]:
        if value == 0 and expected.values.get(key) is None:
            got.values[key] = None
    return True


def round_tied_masters(master: torch.Tensor) -> torch.Tensor:
    """The one rounding of a float32 master (any shape) by a backend that keeps remainders.

    A master exactly between two bfloat16 values, whose parameter another backend rounded to the
    even one towards zero, cannot be coded beside it: it loses one unit in the last place.
    """
    as_bits = master.contiguous().view(torch.int32)
    tied = (as_bits & 0x1FFFF) == 0x08000
    return (as_bits - tied.to(torch.int32)).view(torch.float32)


def _compare_tensors(
    key: tuple[str, str], a: torch.Tensor, b: torch.Tensor, round_to_got: bool
) -> list[Difference]:
    if a.shape != b.shape:
        return [Difference(*key, f"shape {tuple(b.shape)} instead of {tuple(a.shape)}")]
    if a.dtype != b.dtype:
        if not round_to_got:
            return [Difference(*key, f"dtype {b.dtype} instead of {a.dtype}")]
        a = a.to(b.dtype)
    different = bits(a) != bits(b)
    count = int(different.sum())
    if not count:
        return []
    gap = (a.double() - b.double()).abs()[different]
    finite = gap[torch.isfinite(gap)]
    max_abs = float(finite.max()) if finite.numel() else None
    what = f"{count} of {a.numel()} elements differ"
    return [Difference(*key, what, count, a.numel(), max_abs)]


def _compare_values(
    key: tuple[str, str], expected: dict[tuple[str, str], Any], got: dict[tuple[str, str], Any]
) -> list[Difference]:
    a, b = expected.get(key), got.get(key)
    if _same_value(a, b):
        return []
    return [Difference(*key, f"{b!r} instead of {a!r}")]

"""What one launch measures: sizes, backends, rounds and variants, as asked for and as they fit."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.report import DP, FULLY, OURS

#: Words of `--only`, in the order of the report.
WORDS = {"fully": FULLY, "dp": DP, "ours": OURS}


@dataclass(frozen=True)
class Configuration:
    """One model and optimizer, and the turns that are taken on it.

    Attributes:
        rounds: rounds that count; in each, every variant has one turn.
        fully_rounds: stock fully_reshardable takes part in so many of them at most.
        variants: full names, in the order of the report.
        left_out: why variants that were asked for have no turn.
    """

    size: str
    backend: str
    rounds: int
    fully_rounds: int
    variants: tuple[str, ...]
    left_out: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def variants_of(words: list[str]) -> tuple[str, ...]:
    """Full names of the words of `--only`; all when there are none.

    Raises:
        argparse.ArgumentTypeError: a word is unknown.
    """
    for word in words:
        if word not in WORDS:
            raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(WORDS)}")
    return tuple(name for word, name in WORDS.items() if word in words or not words)


def parse_run(text: str) -> dict[str, Any]:
    """The values of `SIZE/BACKEND[,rounds=N][,fully=N][,only=WORD[+WORD]]`, as far as given.

    Raises:
        argparse.ArgumentTypeError: the text is not of that form, or a name is unknown.
    """
    place, *options = text.split(",")
    size, slash, backend = place.partition("/")
    if not slash:
        raise argparse.ArgumentTypeError(f"{text!r} does not begin with SIZE/BACKEND")
    values: dict[str, Any] = {"size": size, "backend": backend}
    for option in options:
        name, _, value = option.partition("=")
        if name in ("rounds", "fully") and value.isdigit():
            values["rounds" if name == "rounds" else "fully_rounds"] = int(value)
        elif name == "only":
            values["variants"] = variants_of(value.split("+"))
        else:
            raise argparse.ArgumentTypeError(f"{option!r} is none of rounds=N, fully=N, only=WORD")
    return values


def asked_for(arguments: argparse.Namespace) -> list[Configuration]:
    """The `--run`s; those of `--size` and `--backend` before them, when these or no `--run` are.

    Raises:
        SystemExit: a size or a backend is unknown.
    """
    from benchmarks.state import BACKENDS, SIZES

    common = {
        "rounds": arguments.repeats,
        "fully_rounds": arguments.fully_rounds,
        "variants": variants_of(arguments.only or []),
    }
    runs: list[dict[str, Any]] = list(arguments.run or [])
    if arguments.size or arguments.backend or not runs:
        sizes = arguments.size or (["1.2b"] if arguments.device == "cuda" else ["45m"])
        backends = arguments.backend or ["hybrid", "fused"]
        runs = [{"size": s, "backend": b} for s in sizes for b in backends] + runs
    found = [Configuration(**{**common, **run}) for run in runs]
    for one in found:
        for word, known in ((one.size, SIZES), (one.backend, BACKENDS)):
            if word not in known:
                raise SystemExit(f"{word!r} is none of {', '.join(known)}")
    return found


def that_fit(
    configurations: list[Configuration], *, ranks: int, device: str, folder: Path
) -> list[Configuration]:
    """The same without the variants for which there is no memory, with a note of each.

    Raises:
        SystemExit: nothing is left of one; nothing was allocated yet.
    """
    from benchmarks import fit

    fitting = []
    for one in configurations:
        problems = {
            variant: fit.problem(
                one.size, one.backend, variant, ranks=ranks, device=device, folder=folder
            )
            for variant in one.variants
        }
        notes = tuple(f"{variant}: {text}" for variant, text in problems.items() if text)
        kept = tuple(variant for variant, text in problems.items() if not text)
        if not kept:
            raise SystemExit(f"{one.size}/{one.backend} does not fit: {'; '.join(notes)}")
        fitting.append(replace(one, variants=kept, left_out=notes))
    return fitting

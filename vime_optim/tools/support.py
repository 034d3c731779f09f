"""Which megatron-core works with which torch, Python and nvidia-resiliency-ext; `doctor` reads it.

Facts about Megatron itself, with or without vime_optim. torch: from 0.18 on a load calls torch's
`load(no_dist=True)`, which came with torch 2.7.0. Tried with torch 2.6.0 on Python 3.12 on
2026-12-01: a resume with CPU offload is exact on 0.16.1 and 0.17.1, and on 0.18.2 the load ends in
that TypeError. Python: `Requires-Python` of the wheels; their code also runs
on older ones when it is unpacked or checked out, but for megatron.training from 0.19 on, which
imports `typing.override`. tests/tools/test_support.py asks the releases' own files.
"""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import Version


@dataclass(frozen=True)
class Support:
    """The oldest of each that one release line of megatron-core works with.

    `training`: of Python, for megatron.training. `nvrx`: of nvidia-resiliency-ext, where it is
    installed; an older one keeps megatron-core from being imported.
    """

    line: str
    torch: str
    python: str
    training: str
    nvrx: str | None = None


TABLE = (
    Support("0.15", torch="2.6", python="3.10", training="3.10"),
    Support("0.16", torch="2.6", python="3.10", training="3.10"),
    Support("0.17", torch="2.6", python="3.12", training="3.10", nvrx="0.6"),
    Support("0.18", torch="2.7", python="3.12", training="3.10", nvrx="0.6"),
    Support("0.19", torch="2.7", python="3.12", training="3.12", nvrx="0.6"),
    Support("0.20", torch="2.7", python="3.12", training="3.12", nvrx="0.6"),
)


def of(megatron: Version) -> Support | None:
    """The line of a version; a newer one than all of them counts as the newest."""
    line = f"{megatron.release[0]}.{(*megatron.release, 0)[1]}"
    found = [support for support in TABLE if Version(support.line) <= Version(line)]
    return found[-1] if found else None


def problems(
    megatron: Version,
    *,
    torch: str | None,
    python: tuple[int, int],
    has_training: bool,
    nvrx: str | None,
) -> list[str]:
    """What does not go together here, as advice; versions as their packages give them."""
    support = of(megatron)
    if support is None:
        return []
    found = []
    name = f"megatron-core {megatron}"
    if torch is not None and Version(torch).release < Version(support.torch).release:
        found.append(
            f"{name} needs torch {support.torch} or newer, not {torch}: every load ends in"
            " `load() got an unexpected keyword argument 'no_dist'`; this is Megatron's own, with"
            " or without vime_optim"
            if support.torch != "2.6"
            else f"{name} needs torch {support.torch} or newer, not {torch}"
        )
    here = ".".join(map(str, python))
    if has_training and Version(here) < Version(support.training):
        found.append(
            f"megatron.training of {name} needs Python {support.training} or newer, not {here}:"
            " it imports `typing.override`"
        )
    if support.nvrx and nvrx is not None and Version(nvrx).release < Version(support.nvrx).release:
        found.append(
            f"{name} cannot be imported beside nvidia-resiliency-ext {nvrx}: upgrade it to"
            f" {support.nvrx} or newer, or uninstall it"
        )
    return found


def markdown() -> str:
    """The table as the docs show it."""
    lines = [
        "| megatron-core | torch | Python, wheel | Python, megatron.training "
        "| nvidia-resiliency-ext, if installed |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.line} | {row.torch} | {row.python} | {row.training} | {row.nvrx or 'any'} |"
        for row in TABLE
    ]
    return "\n".join(lines)

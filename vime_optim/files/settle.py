"""The end of a load: chunks that were used and that no rank has compared yet.

They are compared now, shared by the ranks, as far as that is cheap; the rest is counted.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from vime_optim import log
from vime_optim.counters import counters
from vime_optim.files.checked import FREE_BYTES, SHARE, FileCheck
from vime_optim.files.reading import default_threads

COMPARED = "bytes of checkpoint files compared with their digests"
NOT_COMPARED = "bytes of checkpoint files loaded without comparing digests"

Flags = npt.NDArray[np.uint8]


def flags_of(checks: Sequence[FileCheck]) -> Flags:
    """For every chunk of the files: 2 used and compared, 1 only used, 0 not used."""
    flags = np.zeros(sum(check.chunks for check in checks), np.uint8)
    first = 0
    for check in checks:
        flags[first + np.fromiter(check.used, np.intp)] = 1
        flags[first + np.fromiter(check.used & check.right, np.intp)] = 2
        first += check.chunks
    return flags


def settle(checks: Sequence[FileCheck], flags: Flags, part: int = 0, parts: int = 1) -> None:
    """Compare what was used and not compared, as far as that is cheap, and count the rest.

    Args:
        flags: of `flags_of`; where ranks share the work, the largest of all of them.
        part, parts: every `parts`-th chunk is this rank's.

    Raises:
        CheckpointError: a chunk is not what was written.
        OSError: it cannot be read.
    """
    places = [(check, number) for check in checks for number in range(check.chunks)]
    sizes = np.array([c.end_of(n) - n * c.chunk_bytes for c, n in places], np.int64)
    used_bytes = int(sizes[flags > 0].sum())
    left = np.flatnonzero(flags == 1)
    cheap_bytes = parts * FREE_BYTES + used_bytes // SHARE
    cheap = int(np.searchsorted(sizes[left].cumsum(), cheap_bytes, side="right"))
    mine = [places[at] for at in left[:cheap][part::parts]]
    if mine:
        with ThreadPoolExecutor(default_threads(), thread_name_prefix="vime_optim compare") as pool:
            list(pool.map(lambda place: place[0].read_and_compare(place[1]), mine))
    for check in checks:
        check.used.clear()  # of what is read later, this is settled
    _count(used_bytes, int(sizes[left[cheap:]].sum()))


def compare_rest(checks: Sequence[FileCheck]) -> None:
    """Settle what this rank alone has used since the files were settled last."""
    if checks:
        settle(checks, flags_of(checks))


def _count(used_bytes: int, left_bytes: int) -> None:
    counters[COMPARED] += used_bytes - left_bytes
    if left_bytes:
        counters[NOT_COMPARED] += left_bytes
        log.say(
            logging.INFO,
            f"vime_optim: {left_bytes} of {used_bytes} bytes were loaded without comparing them"
            " with their digests, which cover more than any rank reads at once;"
            " VIME_OPTIM_VERIFY=all compares every byte",
        )

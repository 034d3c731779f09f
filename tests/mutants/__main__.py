"""`make mutants`: makes small changes to the package, one at a time; a test must notice each.

    python -m tests.mutants [--jobs 2] [--list] [-k TEXT]

The changes stand in the `*.yml` files beside this one (see changes.py). Each is made in a copy of
the tree, in which only the tests that it names are run, in a process forked from one that has
imported torch. First the same tests run on an unchanged copy: they must pass, and none may skip.

It fails when a change survives, when its text is not in the file exactly once, when it cannot even
be imported, and when its tests take longer than the limit.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.mutants.changes import ROOT, Change, ChangeError, read_changes
from tests.mutants.forked import LIMIT_S, Ran, preload, run_tests


def copy_tree(target: Path) -> Path:
    """The files that git knows or would add; what tests build stays where it is."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        source = ROOT / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)
    return target


def judge(change: Change, ran: Ran) -> str:
    """ "noticed", or what is wrong."""
    if change.equal is not None:
        return "equal, as said" if ran.status == 0 else "said to be equal, and a test noticed it"
    if ran.status is None:
        return f"its tests took more than {LIMIT_S} s"
    return {0: "SURVIVED", 1: "noticed"}.get(
        ran.status, f"its tests could not be run (pytest ended with {ran.status})"
    )


def work(changes: list[Change], tree: Path, answers: Any) -> None:
    """Try changes one after the other in one copy of the tree."""
    for change in changes:
        began = time.monotonic()
        try:
            with change.made_in(tree):
                ran = run_tests(tree, change.tests)
            answer = judge(change, ran)
        except ChangeError as error:
            ran, answer = Ran(None, ""), str(error)
        answers.put((change, answer, ran.output, time.monotonic() - began))


def check_unchanged(changes: list[Change], tree: Path) -> bool:
    """Whether all tests named pass on the tree as it is."""
    tests = tuple(sorted({test for change in changes for test in change.tests}))
    began = time.monotonic()
    ran = run_tests(tree, tests, limit_s=4 * LIMIT_S, to_the_end=True)
    print(f"unchanged: {len(tests)} tests or groups, {time.monotonic() - began:.0f} s", flush=True)
    if ran.status != 0:
        print(ran.output[-6000:])
        print("The tests do not pass on the unchanged tree.")
    return ran.status == 0


def try_all(changes: list[Change], trees: list[Path]) -> list[tuple[Change, str]]:
    """Every change tried, in as many processes as there are copies; those that went wrong."""
    context = multiprocessing.get_context("fork")
    answers: Any = context.Queue()
    shares = [changes[number :: len(trees)] for number in range(len(trees))]
    workers = [
        context.Process(target=work, args=(share, tree, answers), daemon=False)
        for share, tree in zip(shares, trees, strict=True)
    ]
    for worker in workers:
        worker.start()
    wrong = []
    for _ in changes:
        change, answer, output, took_s = answers.get()
        good = answer in ("noticed", "equal, as said")
        print(f"{answer:>14}  {took_s:5.1f} s  {change.file}: {change.name}", flush=True)
        if not good:
            wrong.append((change, answer))
            print(output[-2500:], flush=True)
    for worker in workers:
        worker.join()
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="show the changes, try none")
    parser.add_argument("-k", default="", help="only changes whose file, name or test holds this")
    args = parser.parse_args()
    changes = [c for c in read_changes() if args.k in " ".join((c.file, c.name, *c.tests))]
    if not changes:
        print("no such change")
        return 2
    if args.list:
        print("\n".join(f"{c.file}: {c.name}" for c in changes))
        return 0
    began = time.monotonic()
    preload()
    with tempfile.TemporaryDirectory(prefix="vime-mutants-") as folder:
        count = max(1, min(args.jobs, len(changes)))
        trees = [copy_tree(Path(folder) / str(number)) for number in range(count)]
        if not check_unchanged(changes, trees[0]):
            return 1
        wrong = try_all(changes, trees)
    for change, answer in wrong:
        print(f"{change.file}: {change.name}: {answer}")
    noticed = len(changes) - len(wrong)
    print(f"{noticed} of {len(changes)} changes as expected, {time.monotonic() - began:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

"""Runs cases by hand: `PYTHONPATH=tests python -m clients TREE [CASE ...]`; all without a name.

`--install no` runs them on stock, `--keep FOLDER` keeps records, checkpoints and logs.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from clients.cases import CASES
from clients.client import RunFailed, run_case
from clients.pool import Pool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tree")
    parser.add_argument("case", nargs="*")
    parser.add_argument("--install", choices=("no", "after", "late"))
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    wanted = [case for case in CASES if options.tree in case.trees]
    if options.case:
        wanted = [case for case in CASES if case.name in options.case]
    pool = Pool(options.keep or Path(tempfile.mkdtemp(prefix="clients.")))
    for case in wanted:
        started = time.monotonic()
        try:
            found = run_case(pool.template_of(case, options.tree), case, install=options.install)
            verdict = "DIFFERS " + "; ".join(found[:3]) if found else "exact"
        except (RunFailed, AssertionError) as error:
            verdict = "FAILS " + str(error).splitlines()[0]
        print(f"{time.monotonic() - started:4.0f} s  {case.name}: {verdict}", flush=True)
    pool.close()


if __name__ == "__main__":
    main()

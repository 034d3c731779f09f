"""Many cases in one template process, one line each; the developer's test bench.

    python -m tests.bench --megatron 0.16.1 \\
        'hybrid,pao,f=1,fully_reshardable,dp=2,stock' 'hybrid,pao,f=0.5,fully_reshardable,dp=2->3'

The words of a case are listed at the top of cases.py. Captures, checkpoints and the logs of every
rank stay below `--dir` when one is given.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.cases import Case, tree_of
from vime_optim.errors import VimeOptimError
from vime_optim.verify.launch import open_launcher
from vime_optim.verify.runner import Outcome, run_case


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench")
    parser.add_argument("cases", nargs="+", help="compact spellings of cases, see tests/cases.py")
    parser.add_argument("--megatron", action="append", help="release or path; may be repeated")
    parser.add_argument(
        "--stock", action="store_true", help="also run every case without install()"
    )
    parser.add_argument("--dir", type=Path, help="keep checkpoints, captures and logs here")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds per launch")
    parser.add_argument("--continuous", action="store_true", help="a separate run that never saves")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("-v", action="store_true", help="every difference, and tracebacks")
    options = parser.parse_args(arguments)
    status = 0
    try:
        for megatron in options.megatron or ["0.16.1"]:
            cases = [Case.parse(text, megatron=megatron) for text in options.cases]
            if options.stock:
                cases = [c.replace(install=on) for c in cases for on in (False, True)]
            status |= _run_all(megatron, cases, options)
    except VimeOptimError as error:
        print(error, file=sys.stderr)
        return 2
    return status


def _run_all(megatron: str, cases: list[Case], options: argparse.Namespace) -> int:
    status = 0
    with tempfile.TemporaryDirectory(prefix="vime-bench-") as temporary:
        root = options.dir or Path(temporary)
        with open_launcher(tree_of(megatron)) as launcher:
            for index, case in enumerate(cases):
                outcome = run_case(
                    launcher,
                    case,
                    root / f"{Path(megatron).name}-{index}",
                    separate_continuous=options.continuous,
                    timeout_s=options.timeout,
                )
                _print(outcome, options)
                status |= 0 if outcome.exact else 1
    return status


def _print(outcome: Outcome, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(outcome.to_dict()), flush=True)
        return
    print(f"{outcome.case.name}  [{outcome.seconds:.1f} s]  {outcome.summary()}", flush=True)
    if not options.v:
        return
    for stage in outcome.stages:
        for text in stage.differences:
            print(f"    {stage.name}: {text}")
    if outcome.traceback:
        print("    " + outcome.traceback.replace("\n", "\n    "))
    print(f"    facts: {outcome.facts}  hits: {outcome.hits}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())

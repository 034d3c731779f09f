"""The commands inspect, check, diff, repair, export and import: arguments and printing only.

Exit status: 0 fine (diff: equal), 1 faults found (diff: different), 2 it cannot be said or done.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from typing import Any

from vime_optim.errors import VimeOptimError, printable

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
DTYPES = ("float32", "float16", "bfloat16", "float64")
COMMANDS = ("inspect", "check", "diff", "repair", "export", "import")


def byte_count(text: str) -> int:
    """A number of bytes: 1073741824, 1GiB or 512M (powers of 1024)."""
    found = re.fullmatch(r"(\d+)\s*([kmgt]?)(i?b)?", text.strip().lower())
    if found is None or int(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes, such as 512MiB")
    return int(found[1]) * _UNITS[found[2]]


def add_arguments(subparsers: Any) -> None:
    """Adds the six commands to `ArgumentParser.add_subparsers()`'s result."""
    inspect = _command(subparsers, "inspect", "say what a checkpoint holds and what is wrong")
    inspect.add_argument(
        "directory", help="iter_XXXXXXX directory, or the folder that holds its latest"
    )
    inspect.add_argument("--tree", action="store_true", help="list every tensor")

    check = _command(subparsers, "check", "compare every byte with what was written")
    check.add_argument(
        "directory",
        help="iter_XXXXXXX directory that vime_optim saved, or the folder of its latest",
    )
    check.add_argument("--quick", action="store_true", help="sizes and stamps alone")

    diff = _command(subparsers, "diff", "compare two checkpoints bit by bit, by name")
    diff.add_argument("a")
    diff.add_argument("b")
    _memory(diff)

    repair = _command(subparsers, "repair", "write a mended checkpoint that stock Megatron loads")
    repair.add_argument("directory")
    repair.add_argument("--out", required=True, metavar="NEW", help="a new directory")
    repair.add_argument("--dry-run", action="store_true", help="say what would be done")
    repair.add_argument("--copy", action="store_true", help="no hard links to the old files")
    _memory(repair)

    export = _command(subparsers, "export", "write optimizer state (and weights) as safetensors")
    export.add_argument("directory")
    export.add_argument("--out", required=True, help="a new directory, or an unfinished export")
    export.add_argument(
        "--model",
        action="store_true",
        help="also the model's weights, which are left out otherwise",
    )
    export.add_argument("--include", action="append", default=[], metavar="GLOB")
    export.add_argument("--exclude", action="append", default=[], metavar="GLOB")
    export.add_argument("--dtype", choices=DTYPES, help="convert floating-point tensors")
    export.add_argument("--shard-bytes", type=byte_count, default=4 << 30, metavar="BYTES")
    _memory(export)

    importer = _command(subparsers, "import", "write a Megatron checkpoint from an export")
    importer.add_argument("directory", help="what export wrote")
    importer.add_argument("--out", required=True, help="a new directory")
    _memory(importer)


def _command(subparsers: Any, name: str, summary: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name, help=summary, description=summary[0].upper() + summary[1:] + "."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(command=name)
    return parser


def _memory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--memory-bytes",
        type=byte_count,
        default=1 << 30,
        metavar="BYTES",
        help="bound for tensor data in memory (default 1GiB)",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command of `args.command`; prints, and returns the exit status."""
    try:
        status, report, lines = _RUNNERS[args.command](args)
    except BrokenPipeError:
        raise
    except Exception as error:
        # Whatever a damaged or hostile directory makes happen, the user gets words for it.
        return _failed(error, args.json)
    print(json.dumps(report, indent=1, default=str) if args.json else "\n".join(lines))
    return status


def _failed(error: Exception, as_json: bool) -> int:
    known = isinstance(error, VimeOptimError)
    text = str(error) if known else f"This failed unexpectedly: {type(error).__name__}: {error}"
    if isinstance(error, OSError) and not known:
        text = f"A file cannot be used: {error}"
    if isinstance(error, MemoryError):
        text = "There is not enough memory; give a smaller --memory-bytes."
    if as_json:
        fields = {
            k: getattr(error, k, None) for k in ("what", "where", "got", "expected", "next_step")
        }
        print(json.dumps({"error": {**fields, "text": text}}, indent=1, default=str))
    else:
        lines = [line[:2000] for line in printable(text).splitlines()]
        print("\n".join(lines), file=sys.stderr)
    return 2


def _run_inspect(args: argparse.Namespace) -> tuple[int, Any, list[str]]:
    from vime_optim.tools.inspect import inspect_checkpoint
    from vime_optim.tools.render import inspect_lines

    report = inspect_checkpoint(args.directory, tree=args.tree)
    return (1 if report.errors else 0), report.to_dict(), inspect_lines(report)


def _run_check(args: argparse.Namespace) -> tuple[int, Any, list[str]]:
    from vime_optim.files.manifest import require_manifest, verify_directory
    from vime_optim.tools.place import checkpoint_directory
    from vime_optim.tools.render import check_lines

    directory = checkpoint_directory(args.directory)
    require_manifest(directory)
    outcome = verify_directory(directory, deep=not args.quick)
    return (0 if outcome.ok else 1), dataclasses.asdict(outcome), check_lines(outcome)


def _run_diff(args: argparse.Namespace) -> tuple[int, Any, list[str]]:
    from vime_optim.tools.diff import diff_checkpoints
    from vime_optim.tools.render import diff_lines

    report = diff_checkpoints(
        args.a, args.b, memory_bytes=args.memory_bytes, show_progress=not args.json
    )
    return report.verdict, report.to_dict(), diff_lines(report)


def _run_repair(args: argparse.Namespace) -> tuple[int, Any, list[str]]:
    from vime_optim.tools.render import repair_lines
    from vime_optim.tools.repair import repair_checkpoint

    plan = repair_checkpoint(args.directory, args.out, dry_run=args.dry_run, link=not args.copy)
    return 0, plan.to_dict(), repair_lines(plan)


def _run_export(args: argparse.Namespace) -> tuple[int, Any, list[str]]:
    import torch

    from vime_optim.tools.export import export_checkpoint
    from vime_optim.tools.render import written_lines

    report = export_checkpoint(
        args.directory,
        args.out,
        model=args.model,
        include=args.include,
        exclude=args.exclude,
        dtype=getattr(torch, args.dtype) if args.dtype else None,
        shard_bytes=args.shard_bytes,
        memory_bytes=args.memory_bytes,
        show_progress=not args.json,
    )
    return 0, report.to_dict(), written_lines(report.to_dict())


def _run_import(args: argparse.Namespace) -> tuple[int, Any, list[str]]:
    from vime_optim.tools.importer import import_checkpoint
    from vime_optim.tools.render import written_lines

    report = import_checkpoint(
        args.directory, args.out, memory_bytes=args.memory_bytes, show_progress=not args.json
    )
    return 0, report.to_dict(), written_lines(report.to_dict())


_RUNNERS = {
    "inspect": _run_inspect,
    "check": _run_check,
    "diff": _run_diff,
    "repair": _run_repair,
    "export": _run_export,
    "import": _run_import,
}

"""The command line: argument parsing and printing only; commands are loaded when asked for."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from vime_optim import __version__
from vime_optim.errors import VimeOptimError

Run = Callable[[argparse.Namespace], int]

_DESCRIPTION = "Exact resume for Megatron's distributed optimizer."

#: Command name and one-line help, in the order of `--help`.
COMMANDS = {
    "verify": "train, save, load in fresh processes, and compare every bit",
    "plan": "estimate what a save or load costs, without running one",
    "inspect": "what a checkpoint holds",
    "check": "compare every byte of a checkpoint with what was written",
    "diff": "compare two checkpoints",
    "repair": "mend a checkpoint that a broken tree wrote",
    "export": "write a checkpoint's optimizer state (and weights) as safetensors",
    "import": "make a checkpoint from an export",
    "status": "install the fixes here and show what each one found",
    "doctor": "what was found on this machine, and what to do",
    "patches": "list or write the fixes as diffs for one release of megatron-core",
}
_SIGPIPE_STATUS = 141
"""What a shell reports of a program that a closed pipe ended."""

_CHECKPOINT_COMMANDS = ("inspect", "check", "diff", "repair", "export", "import")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 fine, 1 a check failed, 2 it could not be run."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = next((word for word in given if not word.startswith("-")), None)
    parser, runners = build_parser(command)
    args = parser.parse_args(given)
    if args.command is None:
        parser.print_help()
        return 2
    try:
        status = runners[args.command](args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _SIGPIPE_STATUS
    except VimeOptimError as error:
        print(f"vime-optim {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def build_parser(command: str | None) -> tuple[argparse.ArgumentParser, dict[str, Run]]:
    """The parser with the arguments of `command` alone (None: of no command), and the runners."""
    parser = argparse.ArgumentParser(prog="vime-optim", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"vime-optim {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    runners: dict[str, Run] = {}
    if command in _CHECKPOINT_COMMANDS:
        from vime_optim.tools import commands as checkpoint_cli

        checkpoint_cli.add_arguments(subparsers)
        runners.update(dict.fromkeys(_CHECKPOINT_COMMANDS, checkpoint_cli.run))
    for name, text in COMMANDS.items():
        if name in subparsers.choices:
            continue
        subparser = subparsers.add_parser(name, help=text, description=text)
        if name == command and name in _OWN_COMMANDS:
            runners[name] = _OWN_COMMANDS[name](subparser)
    return parser, runners


def _verify(parser: argparse.ArgumentParser) -> Run:
    from vime_optim.verify.command import add_verify_arguments, run_verify

    add_verify_arguments(parser)
    return run_verify


def _plan(parser: argparse.ArgumentParser) -> Run:
    from vime_optim.tools.estimate.command import add_plan_arguments, run_plan

    add_plan_arguments(parser)
    return run_plan


def _status(parser: argparse.ArgumentParser) -> Run:
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.add_argument("--megatron", help="path or release (default: the installed one)")
    return _run_status


def _run_status(args: argparse.Namespace) -> int:
    import json
    import warnings

    import vime_optim
    from vime_optim.compat import find_megatron
    from vime_optim.installer import import_targets

    if args.megatron is not None:
        from vime_optim.tools.megatron_source import resolve

        sys.path.insert(0, str(resolve(args.megatron)))
    found = find_megatron() is not None
    if found:
        import torch

        from vime_optim.simulate.bootstrap import without_gpu

        if not torch.cuda.is_available():
            os.environ.update(without_gpu(os.environ))
        vime_optim.install()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's, about what is not installed
        failed = import_targets() if found else {}
    report = vime_optim.status()
    print(json.dumps(report.to_dict(), indent=2, default=str) if args.json else report)
    for module, error in failed.items():
        print(f"{module} cannot be imported: {error}", file=sys.stderr)
    if not found:
        print(
            "vime-optim status: megatron-core is not found. Put it on sys.path (a wheel, or"
            " PYTHONPATH to a checkout), or look at another one with --megatron.",
            file=sys.stderr,
        )
    return 0 if found and not failed else 1


def _doctor(parser: argparse.ArgumentParser) -> Run:
    from vime_optim.tools.doctor import add_doctor_arguments, run_doctor

    add_doctor_arguments(parser)
    return run_doctor


def _patches(parser: argparse.ArgumentParser) -> Run:
    from vime_optim.tools.patch_files import add_patches_arguments, run_patches

    add_patches_arguments(parser)
    return run_patches


_OWN_COMMANDS: dict[str, Callable[[argparse.ArgumentParser], Run]] = {
    "verify": _verify,
    "plan": _plan,
    "status": _status,
    "doctor": _doctor,
    "patches": _patches,
}


if __name__ == "__main__":
    raise SystemExit(main())

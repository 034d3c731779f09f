"""The command line: argument parsing and printing only; commands are loaded when asked for."""

from __future__ import annotations

import argparse
import importlib
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

#: The modules that hold `add_COMMAND_arguments` and `run_COMMAND`.
_OWN_COMMANDS = {
    "verify": "vime_optim.verify.command",
    "plan": "vime_optim.tools.estimate.plan_command",
    "status": "vime_optim.tools.doctor",
    "doctor": "vime_optim.tools.doctor",
    "patches": "vime_optim.tools.patch_files",
}
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
        from vime_optim.tools import commands

        commands.add_arguments(subparsers)
        runners.update(dict.fromkeys(_CHECKPOINT_COMMANDS, commands.run))
    for name, text in COMMANDS.items():
        if name in subparsers.choices:
            continue
        subparser = subparsers.add_parser(name, help=text, description=text)
        if name == command and name in _OWN_COMMANDS:
            module = importlib.import_module(_OWN_COMMANDS[name])
            getattr(module, f"add_{name}_arguments")(subparser)
            runners[name] = getattr(module, f"run_{name}")
    return parser, runners


if __name__ == "__main__":
    raise SystemExit(main())

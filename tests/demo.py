"""What `make demo` runs: the job with the fixes, then the same job on the stock megatron-core."""

from __future__ import annotations

import argparse
from pathlib import Path

from vime_optim.verify.command import DEFAULT_RELEASE, add_verify_arguments, run_verify

DIRECTORY = Path(".build/demo")

_INTRODUCTION = f"""\
A small Qwen3-shaped GPT, megatron-core {DEFAULT_RELEASE}, two data-parallel ranks on a
simulated device, precision-aware optimizer and HybridDeviceOptimizer (--optimizer-cpu-offload).
3 steps, save, fresh processes, load, 2 more steps; every bit is compared with 5 steps in one go.
"""


def main() -> int:
    print(_INTRODUCTION)
    print("1. With vime_optim.install():\n", flush=True)
    fixed = _verify("fixed")
    print(
        "\n2. The same job on the untouched megatron-core (this one is expected to fail):\n",
        flush=True,
    )
    stock = _verify("stock", "--stock")
    print(
        "\n3. And in Megatron's default format, where nothing fails and the run is wrong:\n",
        flush=True,
    )
    silent = _verify("silent", "--stock", "--sharding", "dp_reshardable")
    print()
    if fixed == 0 and stock == 1 and silent == 1:
        print("Demo OK: exact with vime_optim, and not without it.")
        return 0
    print(f"Demo FAILED: exit statuses {fixed}, {stock}, {silent}; expected 0, 1, 1.")
    return 1


def _verify(name: str, *flags: str) -> int:
    parser = argparse.ArgumentParser()
    add_verify_arguments(parser)
    arguments = ["--megatron", DEFAULT_RELEASE, "--dir", str(DIRECTORY / name), *flags]
    return run_verify(parser.parse_args(arguments))


if __name__ == "__main__":
    raise SystemExit(main())

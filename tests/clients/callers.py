"""How frameworks call Megatron, where it differs from pretrain_gpt.py.

Each function changes what a rank's script will do, in that rank alone, before the script runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from clients.record import Record


def install_when_the_model_is_built(install: Callable[[], None]) -> None:
    """A plugin, or a worker of Ray, that gets to call install() late."""
    from megatron.training import training

    original = training.setup_model_and_optimizer

    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        install()
        return original(*args, **kwargs)

    training.setup_model_and_optimizer = setup_model_and_optimizer


def worker_by_spawn(record: Record) -> None:
    _start_worker_by("spawn")


def worker_by_fork(record: Record) -> None:
    _start_worker_by("fork")


def worker_by_forkserver(record: Record) -> None:
    _start_worker_by("forkserver")


def _start_worker_by(method: str) -> None:
    """Megatron-LM 0.18 and newer: the persistent worker, which is started by forkserver there."""
    from megatron.training import initialize

    start = initialize.init_persistent_async_worker
    initialize.init_persistent_async_worker = lambda rank, mp_mode="": start(rank, method)


FAILS_AT = 5
"""The iteration, counted from 1, that fails once in a run that restarts in its process."""


class InjectedFailure(RuntimeError):
    pass


def restart_in_process(record: Record) -> None:
    """What megatron.training.inprocess_restart does, without its monitors.

    A step fails once, state and process groups are destroyed, and pretrain() is called again in the
    same process. The run's arguments must load from the folder that it saves to.
    """
    import megatron.training
    from megatron.training import training

    step, pretrain = training.train_step, training.pretrain
    failed: list[int] = []

    def train_step(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        if not failed and get_args().curr_iteration + 1 == FAILS_AT:
            failed.append(FAILS_AT)
            raise InjectedFailure
        return step(*args, **kwargs)

    def pretrain_twice(*args: Any, **kwargs: Any) -> Any:
        try:
            return pretrain(*args, **kwargs)
        except InjectedFailure:
            _destroy_state()
        record.note("restarted in process")
        record.steps.clear()
        return pretrain(*args, **kwargs)

    training.train_step = train_step
    training.pretrain = megatron.training.pretrain = pretrain_twice


def _destroy_state() -> None:
    import inspect

    import torch
    from megatron.training import get_args, inprocess_restart

    reset = inprocess_restart.reset_persistent_async_worker
    if inspect.signature(reset).parameters:
        reset(get_args().async_strategy)
    else:
        reset()
    torch.distributed.destroy_process_group()
    inprocess_restart.destroy_state()
    _parse_arguments_again()
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 7)
    sys.stdout.flush()


def _parse_arguments_again() -> None:
    """From 0.19 on the script does it before pretrain(), and a restart leaves none behind."""
    from megatron.training import arguments

    if hasattr(arguments, "parse_and_validate_args"):
        arguments.parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})

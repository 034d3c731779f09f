"""Wrappers of `dist_checkpointing.save` and `load`: the same outcome on every rank."""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import Any

from vime_optim.probe import missing_parameters
from vime_optim.registry import NEEDED, Diagnosis, Hit, Target, Wrap, not_understood


def _wrap_save(original: Any, hit: Hit) -> Any:
    signature = inspect.signature(original)

    def save(*args: Any, **kwargs: Any) -> Any:
        directory = str(signature.bind(*args, **kwargs).arguments["checkpoint_dir"])
        if directory.startswith("msc://"):
            return original(*args, **kwargs)
        from vime_optim.writer import commit

        hit()
        session = commit.open_session(directory)
        try:
            request = original(*args, **kwargs)
        except BaseException:
            commit.abandon_session(session)
            raise
        close = functools.partial(commit.close_session, session)
        if request is None:
            close()
        else:
            request.add_finalize_fn(close)
        return request

    return save


def _wrap_load(original: Any, hit: Hit) -> Any:
    signature = inspect.signature(original)

    def load(*args: Any, **kwargs: Any) -> Any:
        from vime_optim.writer import guard, loadcheck

        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        directory = str(bound.arguments["checkpoint_dir"])
        guard.before_update(None)  # DCP reads into the very tensors that a save may be writing
        if not directory.startswith("msc://"):
            hit()
            everybody = bool(bound.arguments.get("validate_access_integrity", True))
            alone = bound.arguments.get("process_group") is not None or not everybody
            loadcheck.check_before_load(directory, collective=not alone)
        return original(*args, **kwargs)

    return load


def _wrap_rank0_step(name: str) -> Wrap:
    """A step that rank 0 takes alone: its failure is raised later, by all."""

    def wrap(original: Any, hit: Hit) -> Any:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            from vime_optim.writer import commit

            directory = str(signature.bind(*args, **kwargs).arguments["checkpoint_dir"])
            session = commit.session_of(directory)
            if session is None:
                return original(*args, **kwargs)
            return commit.rank0_step(session, name, functools.partial(original, *args, **kwargs))

        return step

    return wrap


def _diagnose_directory(module: ModuleType, original: Any) -> Diagnosis:
    reason = missing_parameters(original, "checkpoint_dir")
    return not_understood(reason) if reason else NEEDED


def commit_targets() -> tuple[Target, ...]:
    """Targets of the fix `writer-commit` in megatron.core.dist_checkpointing."""
    package = "megatron.core.dist_checkpointing"

    def target(module: str, name: str, wrap: Wrap, optional: bool = False) -> Target:
        return Target(
            f"{package}.{module}", name, wrap, diagnose=_diagnose_directory, optional=optional
        )

    common = "strategies.common"
    return (
        target("serialization", "save", _wrap_save),
        target("serialization", "load", _wrap_load),
        target("core", "save_config", _wrap_rank0_step("metadata.json")),
        # A method up to 0.16, a function in 0.17 and 0.18, part of the sharded state from 0.19 on.
        target(common, "TorchCommonSaveStrategy.save_common", _wrap_rank0_step("common.pt"), True),
        target(common, "save_common", _wrap_rank0_step("common.pt"), True),
        target("validation", "save_integrity_manifest", _wrap_rank0_step("integrity.json"), True),
    )

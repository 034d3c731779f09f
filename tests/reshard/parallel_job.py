"""Phases of a verify job that save and load through Megatron's fully-parallel wrappers."""

from __future__ import annotations

from typing import Any

from vime_optim.verify import job


def _use_wrappers() -> None:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import fully_parallel

    save_plain, load_plain = dist_checkpointing.save, dist_checkpointing.load

    def group() -> Any:
        return parallel_state.get_data_parallel_group(with_context_parallel=True)

    def save(state: Any, directory: str, **options: Any) -> Any:
        strategy = fully_parallel.FullyParallelSaveStrategyWrapper(
            serialization.get_default_save_sharded_strategy(), group()
        )
        return save_plain(state, directory, sharded_strategy=strategy, **options)

    def load(state: Any, directory: str, **options: Any) -> Any:
        strategy = fully_parallel.FullyParallelLoadStrategyWrapper(
            serialization.get_default_load_sharded_strategy(directory), group()
        )
        return load_plain(state, directory, sharded_strategy=strategy, **options)

    dist_checkpointing.save = save
    dist_checkpointing.load = load


def save(payload: dict[str, Any]) -> dict[str, Any]:
    import vime_optim

    vime_optim.install()
    _use_wrappers()
    return job.save(payload)


def resume(payload: dict[str, Any]) -> dict[str, Any]:
    import vime_optim

    vime_optim.install()
    _use_wrappers()
    return job.resume(payload)

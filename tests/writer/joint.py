"""One rank fails in the course of a save or a load. Every rank must raise, within seconds.

Each place is a function that the ranks pass: (module, attribute, before or after it). The failing
rank raises there, once; then the same process group must still carry a good save and a good load.
"""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.writer.readback import snapshot
from tests.writer.scenarios import Trainer, gathered, rank
from vime_optim.tools.bits import same_bits

_CORE = "megatron.core.dist_checkpointing"
_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_SAVER = f"{_CORE}.strategies.state_dict_saver"
_TORCH = f"{_CORE}.strategies.torch"

#: name: (module[:class], attribute, after the call instead of before)
PLACES = {
    "build": (_OPTIMIZER, "state_dict", True),
    "preprocess": (f"{_CORE}.serialization", "save_preprocess", False),
    "validate": (f"{_CORE}.state_dict_utils", "validate_sharding_integrity", True),
    "translate": (_TORCH, "mcore_to_pyt_state_dict", False),
    "local plan": (f"{_TORCH}:MCoreSavePlanner", "create_local_plan", False),
    "global plan": (f"{_TORCH}:MCoreSavePlanner", "create_global_plan", False),
    "finish plan": (f"{_TORCH}:MCoreSavePlanner", "finish_plan", True),
    "prepare write": (f"{_CORE}.strategies.filesystem_async:FileSystemWriterAsync",
                      "prepare_write_data", False),
    "distribute": (f"{_CORE}.strategies.fully_parallel",
                   "distribute_main_replicas_with_precomputed_distribution", False),
    "write": (f"{_CORE}.strategies.filesystem_async:FileSystemWriterAsync",
              "get_save_function_and_args", False),
    "retrieve": (f"{_CORE}.strategies.filesystem_async:FileSystemWriterAsync",
                 "retrieve_write_results", True),
    "save config": (f"{_CORE}.core", "asdict", False),
    "load common": (f"{_CORE}.serialization", "load_preprocess", False),
    "load validate": (f"{_CORE}.serialization", "validate_integrity_and_strict_load", False),
    "load translate": (_TORCH, "mcore_to_pyt_state_dict", False),
    "load plan": (f"{_TORCH}:MCoreLoadPlanner", "create_local_plan", False),
    "read": (f"{_TORCH}:MCoreLoadPlanner", "commit_tensor", True),
    "merge": (f"{_CORE}.serialization", "apply_factory_merges", False),
}  # fmt: skip
SAVES = tuple(PLACES)[: tuple(PLACES).index("load common")]
LOADS = tuple(PLACES)[len(SAVES) :]
RANK_0_ALONE = ("global plan", "save config")


class Injected(RuntimeError):
    """What the failing rank raises."""


@contextmanager
def failing(place: str, error: BaseException, who: int) -> Iterator[list[int]]:
    """Raise `error` at `place` on rank `who`, once. Yields a list that then has an entry."""
    where, attribute, after = PLACES[place]
    module, _, cls = where.partition(":")
    owner: Any = importlib.import_module(module)
    owner = getattr(owner, cls) if cls else owner
    raw = inspect.getattr_static(owner, attribute)
    was_own = attribute in vars(owner)
    function = getattr(owner, attribute)
    raised: list[int] = []

    def broken(*args: Any, **kwargs: Any) -> Any:
        if after:
            result = function(*args, **kwargs)
        if rank() == who and not raised:
            raised.append(1)
            raise error
        return result if after else function(*args, **kwargs)

    setattr(owner, attribute, staticmethod(broken) if isinstance(raw, staticmethod) else broken)
    try:
        yield raised
    finally:
        if was_own:
            setattr(owner, attribute, raw)
        else:
            delattr(owner, attribute)


def joint(root: str, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Several cases of `_case`, then a good save and a good load in the same process groups."""
    trainer = Trainer(persistent=False, sharding="fully_reshardable", hybrid=False)
    trainer.step()
    whole = Path(root) / "whole"
    expected = _save(trainer, whole)
    outcomes = []
    for number, case in enumerate(cases):
        outcome = _case(trainer, Path(root) / f"case{number}", whole, **case)
        outcomes.append({"case": case, "ranks": gathered(outcome)})
    good = all(same_bits(expected[key], value) for key, value in snapshot(trainer.state()).items())
    return {"outcomes": outcomes, "good": good}


def _case(
    trainer: Trainer,
    folder: Path,
    whole: Path,
    place: str,
    who: int = 1,
    interrupt: bool = False,
    parallel: bool = False,
    is_async: bool = False,
) -> dict[str, Any]:
    error: BaseException = KeyboardInterrupt() if interrupt else Injected(place)
    saves = place in SAVES
    began = time.monotonic()
    caught: BaseException | None = None
    with failing(place, error, who) as raised:
        try:
            if saves:
                _save(trainer, folder, parallel, is_async)
            else:
                _load(trainer, whole, parallel)
        except BaseException as found:
            caught = found
    seconds = time.monotonic() - began
    torch.distributed.barrier()
    outcome = {
        "reached": bool(raised) or rank() != who,
        "type": type(caught).__name__,
        "text": str(caught),
        "seconds": seconds,
        "complete": (folder / "metadata.json").exists(),
        "step": None if saves else _type_of_error(trainer.step),
        "save": None if saves else _type_of_error(trainer.state),
    }
    if not saves:
        _load(trainer, whole)
    return outcome


def _type_of_error(action: Any) -> str | None:
    try:
        action()
    except Exception as error:
        return type(error).__name__
    return None


def _save(
    trainer: Trainer, folder: Path, parallel: bool = False, is_async: bool = False
) -> dict[str, Any]:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import fully_parallel
    from megatron.core.dist_checkpointing.strategies import torch as strategies

    if rank() == 0:
        folder.mkdir(parents=True)
    torch.distributed.barrier()
    options: dict[str, Any] = {}
    strategy = None
    if parallel:
        made = strategies.TorchDistSaveShardedStrategy("torch_dist", 1)
        strategy = fully_parallel.FullyParallelSaveStrategyWrapper(made)
    if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
        options["async_strategy"] = "mcore"
    state = trainer.state()
    expected = snapshot(state) if folder.name == "whole" else {}
    request = dist_checkpointing.save(
        state, str(folder), strategy, async_sharded_save=is_async, **options
    )
    if is_async:
        trainer.queue.schedule_async_request(request)
        trainer.finalize()
    return expected


def _load(trainer: Trainer, folder: Path, parallel: bool = False) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import fully_parallel
    from megatron.core.dist_checkpointing.strategies import torch as strategies

    strategy = None
    if parallel:
        made = strategies.TorchDistLoadShardedStrategy()
        strategy = fully_parallel.FullyParallelLoadStrategyWrapper(made)
    loaded = dist_checkpointing.load(trainer.state(is_loading=True), str(folder), strategy)
    trainer.optimizer.load_state_dict(loaded["optimizer"])

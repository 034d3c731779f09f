"""Checkpoints as verl and AReaL make them: by megatron-core alone, past megatron.training's own.

Read in the frameworks' code on 2026-11-30: AReaL 4aef98d (areal/engine/megatron_utils/
checkpointer.py), verl b178a3c (verl/utils/checkpoint/megatron_checkpoint_manager.py) and 0730d6a,
which keeps model, optimizer and the rest in a folder each and passes metadata; Megatron-Bridge
067f987 (training/setup.py and optim.py), which saves by code of its own and, after every load,
copies parameters over masters.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clients.record import Record


@dataclass(frozen=True)
class Checkpointer:
    """Stands in for save_checkpoint and load_checkpoint of megatron.training.

    `options`: what the framework passes to the optimizer's sharded_state_dict, on load too.
    `loading`: and on load alone. `split`: a folder for each of the three parts.
    """

    options: dict[str, Any]
    loading: dict[str, Any]
    model_metadata: dict[str, Any] | None = None
    split: bool = False

    def save(self, iteration: int, model: Any, optimizer: Any, scheduler: Any, *_: Any) -> None:
        import torch
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
        from megatron.core.dist_checkpointing.strategies import fully_parallel
        from megatron.training import get_args

        folder = Path(get_args().save)
        of_model = self._of_model(model)
        of_optimizer = self._of_optimizer(of_model, optimizer, scheduler, self.options)
        rest = {"rng_state": _random_state()}
        parts = {"model": of_model, "optimizer": of_optimizer, "extra": rest}
        for part, state in (
            parts if self.split else {"": {**of_model, **of_optimizer, **rest}}
        ).items():
            path = folder / f"step_{iteration}" / part
            path.mkdir(parents=True, exist_ok=True)
            request = dist_checkpointing.save(
                state,
                str(path),
                sharded_strategy=fully_parallel.FullyParallelSaveStrategyWrapper(
                    get_default_save_sharded_strategy("torch_dist"), _data_parallel()
                ),
                async_sharded_save=False,
                validate_access_integrity=True,
            )
            assert request is None
            torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))

    def load(self, model: Any, optimizer: Any, scheduler: Any, *_: Any) -> tuple[int, int]:
        from megatron.training import get_args

        folder = Path(get_args().load)
        tracker = folder / "latest_checkpointed_iteration.txt"
        if not tracker.exists():
            return 0, 0
        iteration = int(tracker.read_text())
        options = {**self.options, **self.loading}
        of_model = self._of_model(model)
        if self.split:  # the same description of the model serves the optimizer, after its load
            folder /= f"step_{iteration}"
            model[0].load_state_dict(_load(dict(of_model), folder / "model")["model"])
            template = self._of_optimizer(of_model, optimizer, scheduler, options)
            loaded = _load(template, folder / "optimizer")
            loaded |= _load({"rng_state": _random_state()}, folder / "extra")
        else:
            template = {**of_model, **self._of_optimizer(of_model, optimizer, scheduler, options)}
            template["rng_state"] = _random_state()
            loaded = _load(template, folder / f"step_{iteration}")
            model[0].load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        scheduler.load_state_dict(loaded["lr_scheduler"])
        _set_random_state(loaded["rng_state"])
        return iteration, 0

    def _of_model(self, model: Any) -> dict[str, Any]:
        if self.model_metadata is None:
            return {"model": model[0].module.sharded_state_dict()}
        metadata = {**self.model_metadata, "dp_cp_group": _data_parallel()}
        return {"model": model[0].module.sharded_state_dict(metadata=metadata)}

    def _of_optimizer(
        self, of_model: dict[str, Any], optimizer: Any, scheduler: Any, options: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "optimizer": optimizer.sharded_state_dict(of_model, **options),
            "lr_scheduler": scheduler.state_dict(),
        }


def _load(template: dict[str, Any], folder: Path) -> dict[str, Any]:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
    from megatron.core.dist_checkpointing.strategies import fully_parallel

    strategy = fully_parallel.FullyParallelLoadStrategyWrapper(
        get_default_load_sharded_strategy(str(folder)), _data_parallel()
    )
    loaded: dict[str, Any] = dist_checkpointing.load(
        template, str(folder), sharded_strategy=strategy
    )
    return loaded


def areal(record: Record) -> None:
    """No metadata and, on load too, no is_loading: the template is made of the state that is."""
    _use(Checkpointer(options={}, loading={}))


def verl(record: Record) -> None:
    """No metadata; everything in one folder (verl up to 0.7)."""
    _use(Checkpointer(options={}, loading={"is_loading": True}))


def verl_split(record: Record) -> None:
    """Metadata that asks for dp_reshardable, verl's default, and three folders."""
    metadata = {
        "distrib_optim_sharding_type": "dp_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    _use(
        Checkpointer(
            options={"metadata": metadata, "is_loading": False},
            loading={"is_loading": True},
            model_metadata=metadata,
            split=True,
        )
    )


def bridge(record: Record) -> None:
    """Megatron-Bridge, after each load: the parameters over the masters of CPU offload.

    Its module is a stand-in that copies as the real one does (067f987, training/optim.py).
    """
    import importlib

    import megatron
    from megatron.training import training

    stand_in = Path(__file__).parent.parent / "stand_in" / "megatron"
    megatron.__path__ = [*megatron.__path__, str(stand_in)]
    optim = importlib.import_module("megatron.bridge.training.optim")
    load = training.load_checkpoint

    def load_checkpoint(model: Any, optimizer: Any, *rest: Any, **options: Any) -> Any:
        loaded = load(model, optimizer, *rest, **options)
        optim.sync_hybrid_device_optimizer_fp32_master_copies(optimizer)
        return loaded

    training.load_checkpoint = load_checkpoint


def _use(checkpointer: Checkpointer) -> None:
    from megatron.training import training

    def save_checkpoint(
        iteration: int, model: Any, optimizer: Any, scheduler: Any, *_: Any, **__: Any
    ) -> None:
        checkpointer.save(iteration, model, optimizer, scheduler)

    def load_checkpoint(
        model: Any, optimizer: Any, scheduler: Any, *_: Any, **__: Any
    ) -> tuple[int, int]:
        return checkpointer.load(model, optimizer, scheduler)

    training.save_checkpoint = save_checkpoint
    training.load_checkpoint = load_checkpoint


def _data_parallel() -> Any:
    from megatron.core import mpu

    return mpu.get_data_parallel_group(with_context_parallel=True)


def _random_state() -> Any:
    import numpy
    import torch
    from megatron.core import mpu, tensor_parallel
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    state = {
        "random": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    rank = mpu.get_data_parallel_rank(with_context_parallel=True)
    return ShardedObject("rng_state", [state], (1, 1), (0, 0), replica_id=rank)


def _set_random_state(states: Any) -> None:
    import numpy
    import torch
    from megatron.core import tensor_parallel

    state = states[0]
    random.setstate(state["random"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])

"""What the ranks of a test do. Each function runs on every rank; what it returns goes to JSON.

The model is one bare module with parameters of any size under Megatron's DDP, DistributedOptimizer
and HybridDeviceOptimizer; gradients are filled in, so that the next step comes at once.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import multiprocessing
import os
import signal
import threading
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from tests.writer.readback import differences, snapshot

TRACKER = "latest_checkpointed_iteration.txt"


def prepare() -> None:
    """Import what every scenario needs, before the ranks are forked."""
    from tests.writer.launch import ON_CUDA

    if not ON_CUDA:
        from vime_optim.simulate import megatron

        megatron.prepare("te" if os.environ.get("VIME_OPTIM_TEST_ALL") else "torch")
    import megatron.core.dist_checkpointing


def rank() -> int:
    return torch.distributed.get_rank()


_installation: Any = None


def install_writer_fixes() -> Any:
    """The fixes of this family alone: what fails here is theirs. All of them where
    VIME_OPTIM_TEST_ALL is set."""
    global _installation
    if _installation is None and os.environ.get("VIME_OPTIM_TEST_ALL"):
        import vime_optim

        _installation = vime_optim.install(strict=True)
        if rank() == 0:
            print(vime_optim.status(), flush=True)
    if _installation is None:
        from vime_optim.fixes import FIXES
        from vime_optim.installation import Installation

        writer = [fix for fix in FIXES if fix.id.startswith("writer-")]
        _installation = Installation(writer, (), strict=True)
        _installation.apply()
    return _installation


def uninstall_writer_fixes() -> None:
    global _installation
    _installation.remove()
    _installation = None


class Trainer:
    """A training loop's state: model, optimizer, queue of async saves."""

    def __init__(
        self,
        numel: int = 4096,
        *,
        persistent: bool = True,
        strategy: str = "mcore",
        hybrid: bool = True,
        install: bool = True,
        sharding: str = "dp_reshardable",
    ) -> None:
        from megatron.core import parallel_state

        if install:
            install_writer_fixes()
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel()
        self.strategy = strategy
        self.sharding = sharding
        self.model, self.optimizer = _build(numel, hybrid)
        self.iteration = 0
        self.queue = _shared_queue(strategy, persistent)

    def step(self) -> float:
        """One update with gradients of this iteration's own. Seconds it took."""
        began = time.monotonic()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        for number, parameter in enumerate(self.model.parameters()):
            gradient = 0.01 * (1 + number) * (1 + self.iteration)
            parameter.main_grad.fill_(gradient)
        self.model.finish_grad_sync()
        self.optimizer.step()
        self.iteration += 1
        return time.monotonic() - began

    def state(self, is_loading: bool = False) -> dict[str, Any]:
        from megatron.core import parallel_state
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        metadata = {
            "distrib_optim_sharding_type": self.sharding,
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        replica = (0, 0, parallel_state.get_data_parallel_rank())
        model = {
            name: ShardedTensor.from_rank_offsets(name, parameter, replica_id=replica)
            for name, parameter in self.model.module.named_parameters()
        }
        optimizer = self.optimizer.sharded_state_dict(
            model, is_loading=is_loading, metadata=metadata
        )
        return {"iteration": self.iteration, "model": model, "optimizer": optimizer}

    def save(self, root: str | Path, *, is_async: bool = True) -> tuple[Path, dict[str, Any]]:
        """Ask for a save now. Returns the directory and the values that it has to hold."""
        from megatron.core import dist_checkpointing

        directory = Path(root) / f"iter_{self.iteration:07d}"
        if rank() == 0:
            directory.mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        state = self.state()
        expected = snapshot(state)
        options: dict[str, Any] = {"async_sharded_save": is_async}
        if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
            options["async_strategy"] = self.strategy
        request = dist_checkpointing.save(state, str(directory), **options)
        if is_async:
            request.add_finalize_fn(lambda: self._track(root, directory))
            self.queue.schedule_async_request(request)
        else:
            torch.distributed.barrier()
            self._track(root, directory)
        return directory, expected

    def _track(self, root: str | Path, directory: Path) -> None:
        if rank() == 0:
            (Path(root) / TRACKER).write_text(directory.name)
        torch.distributed.barrier()

    def finalize(self, blocking: bool = True) -> list[int]:
        return list(self.queue.maybe_finalize_async_calls(blocking))

    def load(self, directory: str | Path, template: Any = None) -> None:
        from megatron.core import dist_checkpointing

        template = template or self.state(is_loading=True)
        loaded = dist_checkpointing.load(template, str(directory))
        self.optimizer.load_state_dict(loaded["optimizer"])

    def worker(self) -> Any:
        """The process that writes the last save."""
        from vime_optim.async_save import other_writers

        return other_writers.process_of(self.queue.async_calls[-1].async_caller)

    def close(self) -> None:
        self.queue.close()
        _shared_queue.cache_clear()


class _Block(torch.nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        for number, size in enumerate((numel, numel // 2 + 1, 7, numel)):
            generator = torch.Generator().manual_seed(number)
            value = torch.randn(size, generator=generator).to(torch.bfloat16)
            self.register_parameter(f"p{number}", torch.nn.Parameter(value.to("cuda")))


def _build(numel: int, hybrid: bool) -> tuple[Any, Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, bf16=True)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True, bucket_size=None
    )
    model = DistributedDataParallel(config, ddp, _Block(numel))
    values = {
        "optimizer": "adam",
        "lr": 0.01,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "use_distributed_optimizer": True,
        "use_precision_aware_optimizer": hybrid,
        "optimizer_cpu_offload": hybrid,
        "optimizer_offload_fraction": 1.0,
        "clip_grad": 0.0,
    }
    known = {field.name for field in dataclasses.fields(OptimizerConfig)}
    kept = {name: value for name, value in values.items() if name in known}
    return model, get_megatron_optimizer(OptimizerConfig(**kept), [model])


@functools.cache
def _shared_queue(strategy: str, persistent: bool) -> Any:
    """One queue for all trainers of a launch: the first save of a persistent one starts a worker,
    whose imports take longer than most scenarios."""
    return _calls_queue(strategy, persistent)


def _calls_queue(strategy: str, persistent: bool) -> Any:
    if strategy == "nvrx":
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
    else:
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    return AsyncCallsQueue(persistent=persistent)


def gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def check(directory: Path, expected: dict[str, Any]) -> list[str]:
    """Keys whose bytes on disk are not those of the moment of the save, over all ranks."""
    torch.distributed.barrier()
    return sorted({key for keys in gathered(differences(directory, expected)) for key in keys})


@contextmanager
def held() -> Any:
    """Hold all writers until the block is over, or cannot go on without them: it waits for the
    save, or an update finds no room. What the block does overlaps the write for certain."""
    from vime_optim.async_save.job import SaveJob
    from vime_optim.files.fastfile import DigestingFile

    gate = threading.Event()
    real, wait = DigestingFile.write_vector, SaveJob.wait
    settle, copy = SaveJob.settle, SaveJob._copy
    settling: list[SaveJob] = []

    def write_vector(self: Any, views: Any) -> None:
        gate.wait()
        real(self, views)

    def opening_wait(self: SaveJob) -> None:
        gate.set()
        wait(self)

    def opening_settle(self: SaveJob, units: Any) -> None:
        settling.append(self)
        settle(self, units)
        settling.remove(self)

    def opening_copy(self: SaveJob, units: Any) -> Any:
        left = copy(self, units)
        if left and settling:  # the update has copied what it can, and waits for the rest
            gate.set()
        return left

    DigestingFile.write_vector = write_vector  # type: ignore[method-assign]
    SaveJob.wait, SaveJob._copy = opening_wait, opening_copy  # type: ignore[method-assign]
    SaveJob.settle = opening_settle  # type: ignore[method-assign]
    try:
        yield
    finally:
        gate.set()
        DigestingFile.write_vector = real  # type: ignore[method-assign]
        SaveJob.wait, SaveJob._copy = wait, copy  # type: ignore[method-assign]
        SaveJob.settle = settle  # type: ignore[method-assign]


@contextmanager
def stopped(process: Any) -> Any:
    """Stop a writer process until the block is over."""
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


# Scenarios.


def exact(root: str, cases: list[dict[str, Any]], install: bool = True) -> list[dict[str, Any]]:
    """Several cases of `_exact_case` in one launch."""
    outcomes = []
    for number, case in enumerate(cases):
        folder = Path(root) / f"case{number}"
        run = _sync_case if case == SYNC else _exact_case
        outcomes.append({"case": case, **run(folder, install, **case)})
    return outcomes


SYNC = {"mode": "sync"}


def _sync_case(root: Path, install: bool, mode: str) -> dict[str, Any]:
    """Save device tensors while the training waits; how they got to the files."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    from vime_optim.files.window import HostWindow

    trainer = Trainer(1 << 18, hybrid=False)
    _use("guard", 1 << 30, 32 << 20)
    trainer.step()
    staged: list[int] = []
    pieces: list[int] = []
    stock_stage, real_pieces = FileSystemWriterAsync.preload_tensors, HostWindow.pieces

    def stage(*args: Any, **kwargs: Any) -> Any:
        staged.append(1)
        return stock_stage(*args, **kwargs)

    def counted(self: HostWindow, source: torch.Tensor, settle: Any) -> Any:
        for piece in real_pieces(self, source, settle):
            pieces.append(len(piece))
            yield piece

    FileSystemWriterAsync.preload_tensors = staticmethod(stage)
    HostWindow.pieces = counted
    try:
        directory, expected = trainer.save(root, is_async=False)
        torn = check(directory, expected)
    finally:
        FileSystemWriterAsync.preload_tensors = staticmethod(stock_stage)
        HostWindow.pieces = real_pieces
    manifest = (directory / "vime_optim_manifest.json").is_file()
    return {"torn": [torn], "staged": len(staged), "pieces": pieces, "manifest": manifest}


def _exact_case(
    root: Path,
    install: bool,
    persistent: bool = True,
    strategy: str = "mcore",
    mode: str = "guard",
    numel: int = 1 << 18,
    rounds: int = 2,
    stage_bytes: int = 1 << 30,
    unit_bytes: int = 32 << 20,
    sharding: str = "dp_reshardable",
    shared: bool = False,
    start_method: str | None = None,
) -> dict[str, Any]:
    """Save, step while the writer is stopped, compare; several times, storages moved between."""
    trainer = Trainer(
        numel, persistent=persistent, strategy=strategy, install=install, sharding=sharding
    )
    before = _use(mode, stage_bytes, unit_bytes) if install else {}
    if start_method is not None:
        _start_worker_early(trainer, start_method)
    trainer.step()
    torn: list[list[str]] = []
    children: list[int] = []
    for _ in range(rounds):
        if shared:
            _move_storages(trainer, lambda value: value.clone().share_memory_())
        ours = install and mode != "off"
        with held() if ours else nullcontext():
            directory, expected = trainer.save(root)
            with nullcontext() if ours else stopped(trainer.worker()):
                trainer.step()
                trainer.step()
        children.append(len(multiprocessing.active_children()))
        trainer.finalize()
        torn.append(check(directory, expected))
        _move_storages(trainer, torch.Tensor.clone)
        trainer.step()
    outcome: dict[str, Any] = {"torn": torn, "children": children}
    if install:
        for name in ("async save waits", "async save bytes copied"):
            outcome[name] = _counters().get(name, 0) - before.get(name, 0)
        outcome["manifest"] = (directory / "vime_optim_manifest.json").is_file()
    return outcome


def _start_worker_early(trainer: Trainer, method: str) -> None:
    """As Megatron-LM's initialize does since 0.17, in place of a worker of an earlier case."""
    trainer.close()
    type(trainer.queue).warmup_persistent_caller(rank(), mp_mode=method)


def _use(mode: str, stage_bytes: int, unit_bytes: int) -> dict[str, int]:
    from vime_optim import settings
    from vime_optim.async_save import stage, units

    stage.pool.release()
    units.UNIT_BYTES = unit_bytes
    values = dataclasses.replace(settings.current(), async_mode=mode, stage_bytes=stage_bytes)
    settings.activate(values)
    return _counters()


def _counters() -> dict[str, int]:
    from vime_optim import installer

    return dict(installer.counters)


def _move_storages(trainer: Trainer, move: Any) -> None:
    """As colocated RL does: the state leaves and comes back in other memory."""
    for optimizer in torch_optimizers(trainer.optimizer):
        for state in optimizer.state.values():
            for key, value in list(state.items()):
                if isinstance(value, torch.Tensor):
                    state[key] = move(value)


def torch_optimizers(optimizer: Any) -> list[Any]:
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is not None:
        return [inner for child in chained for inner in torch_optimizers(child)]
    inner = optimizer.optimizer
    return list(getattr(inner, "sub_optimizers", [inner]))


def failures(root: str, names: list[str]) -> dict[str, Any]:
    """See tests/writer/failures.py."""
    from tests.writer import failures as module

    return module.failures(root, names)


def fail_writers(**arguments: Any) -> list[str]:
    """See tests/writer/campaign.py."""
    from tests.writer import campaign

    return campaign.fail_writers(**arguments)


def kill_rank(**arguments: Any) -> None:
    """See tests/writer/campaign.py."""
    from tests.writer import campaign

    campaign.kill_rank(**arguments)


def joint(root: str, cases: list[dict[str, Any]]) -> dict[str, Any]:
    from tests.writer import joint as module

    return module.joint(root, cases)


def flips(**arguments: Any) -> list[Any]:
    """See tests/writer/flips.py."""
    from tests.writer import flips as module

    return module.flips(**arguments)


def load_cost(**arguments: Any) -> dict[str, Any]:
    from tests.writer import flips as module

    return module.load_cost(**arguments)


def planned(root: str, strategy: str) -> dict[str, Any]:
    """Two async saves: what of them is not as it was, and whose planning was wrapped and agreed."""
    from unittest import mock

    from vime_optim.planning import exchange

    agreed = []
    trainer = Trainer(strategy=strategy)
    plan, confirm = exchange.plan_together, exchange.confirm
    with (
        mock.patch.object(exchange, "confirm", lambda o: (agreed.append(strategy), confirm(o))[1]),
        mock.patch.object(
            exchange,
            "plan_together",
            lambda original, *a, **k: (agreed.append(original.__module__), plan(original, *a, **k))[
                1
            ],
        ),
    ):
        wrong = []
        for _ in range(2):
            trainer.step()
            save = trainer.save(root)
            trainer.finalize()
            wrong += check(*save)
    return {"wrong": wrong, "agreed": agreed}


def attacks(**arguments: Any) -> dict[str, Any]:
    """See tests/writer/attacks.py."""
    from tests.writer import attacks as module

    return module.attacks(**arguments)


def formats(root: str) -> dict[str, Any]:
    """See tests/writer/formats.py."""
    from tests.writer import formats as module

    return {
        name: getattr(module, name)(f"{root}/{name}") for name in ("templates", "partial", "frozen")
    }


def overlap(**arguments: Any) -> dict[str, Any]:
    """See tests/writer/overlap.py."""
    from tests.writer import overlap as module

    return module.overlap(**arguments)

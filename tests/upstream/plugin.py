"""A pytest plugin: Megatron's own unit tests, with install() or without, none of them changed.

UPSTREAM_DEVICE is `sim` (the simulated device) or `cuda`, UPSTREAM_INSTALL is `1` for install(),
UPSTREAM_OUT a folder for the outcome of every test, one file a rank.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter, defaultdict
from typing import Any

import pytest

DEVICE = os.environ["UPSTREAM_DEVICE"]
RANK = int(os.environ.get("RANK", "0"))
OUTCOMES: dict[str, str] = {}
TEST = [0]
STARTS: Counter[int] = Counter()
"""Process groups that each test made: a rank that missed one meets the others in the next test."""


def _allow_python_311() -> None:
    import typing

    if not hasattr(typing, "override"):  # megatron.training is written for Python 3.12
        import typing_extensions

        typing.override = typing_extensions.override  # type: ignore[attr-defined]


def _simulate() -> None:
    """The simulated device, and what these tests ask of a device beside it."""
    import torch

    torch.set_num_threads(1)
    from vime_optim.simulate.megatron import prepare

    prepare("te" if os.environ.get("UPSTREAM_ADAM") == "te" else "torch")
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.memory_stats = lambda *a, **k: defaultdict(int)
    cuda.device_count = lambda: int(os.environ.get("WORLD_SIZE", "1"))
    cuda.get_device_properties = lambda *a, **k: _Properties()
    _compare_missing_te()
    _local_layers()
    original = torch.distributed.init_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        world_size, out = int(os.environ["WORLD_SIZE"]), os.environ["UPSTREAM_OUT"]
        STARTS[TEST[0]] += 1
        name = f"{out}/store_{TEST[0]}_{STARTS[TEST[0]]}"
        store = torch.distributed.FileStore(name, world_size)
        original(backend="gloo", world_size=world_size, rank=RANK, store=store)
        # A rank that skips the test would leave while others still connect to it.
        torch.distributed.barrier()

    torch.distributed.init_process_group = init_process_group


def _compare_missing_te() -> None:
    """Up to 0.16 the suite compares the version of a Transformer Engine that is missing."""
    import megatron.core.utils as utils
    from packaging.version import Version

    if utils.get_te_version() is None:
        utils._te_version = Version("0")


def _local_layers() -> None:
    """Layers of Megatron's own where the suite asks for those of Transformer Engine."""
    import inspect

    from megatron.core.models.gpt import gpt_layer_specs as specs

    local, block = specs.get_gpt_layer_local_spec, specs.get_gpt_decoder_block_spec
    known = inspect.signature(local).parameters

    def layer_spec(*args: Any, **kwargs: Any) -> Any:
        return local(*args, **{name: value for name, value in kwargs.items() if name in known})

    def block_spec(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(block).bind(*args, **kwargs)
        bound.arguments["use_transformer_engine"] = False
        return block(*bound.args, **bound.kwargs)

    specs.get_gpt_layer_with_transformer_engine_spec = layer_spec
    specs.get_gpt_decoder_block_spec = block_spec


def _share_devices() -> None:
    """More ranks than GPUs: by gloo and host copies, as NCCL refuses them."""
    import torch

    if int(os.environ["WORLD_SIZE"]) <= torch.cuda.device_count():
        return
    from benchmarks.staging import stage_collectives

    stage_collectives()
    original = torch.distributed.init_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        return original(*args, **{**kwargs, "backend": "gloo"})

    torch.distributed.init_process_group = init_process_group


class _Properties:
    name, major, minor, total_memory, multi_processor_count = "simulated", 9, 0, 1 << 36, 132


def _no_downloads() -> None:
    """The suite's session fixture fetches datasets that the tests of checkpoints do not read."""
    import types

    name = "tests.test_utils.python_scripts.download_unit_tests_dataset"
    stand_in = types.ModuleType(name)
    stand_in.download_and_extract_asset = lambda **_: None  # type: ignore[attr-defined]
    sys.modules[name] = stand_in


_allow_python_311()
if os.environ.get("UPSTREAM_INSTALL") == "1":
    import vime_optim

    vime_optim.install()
if DEVICE == "sim":
    _simulate()
else:
    _share_devices()
_no_downloads()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Some tests expect the process group that one before them has left."""
    import torch

    TEST[0] = item.session.items.index(item)
    if DEVICE == "sim" and not torch.distributed.is_initialized():
        torch.distributed.init_process_group()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Every test leaves some dozen process groups behind; gloo's have threads of their own."""
    import torch

    if DEVICE == "sim" and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    if report.when == "call" or report.outcome != "passed":
        text = report.outcome
        if report.failed:
            lines = str(report.longrepr).strip().splitlines()
            text = f"failed: {next((x for x in reversed(lines) if x.startswith('E ')), lines[-1])}"
        OUTCOMES.setdefault(item.nodeid, text)
        _write()
    return report


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A module that cannot be imported, as it wants Transformer Engine."""
    if report.failed:
        OUTCOMES[report.nodeid] = f"failed: {str(report.longrepr).strip().splitlines()[-1]}"
        _write()


def _write() -> None:
    with open(os.path.join(os.environ["UPSTREAM_OUT"], f"rank{RANK}.json"), "w") as file:
        json.dump(OUTCOMES, file, indent=1)

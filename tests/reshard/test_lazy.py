"""Coded states are saved as the values that they stand for, without memory for them all."""

from __future__ import annotations

import copy
import pickle
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import Case
from tests.phases import Phases
from vime_optim.files import fastfile
from vime_optim.files.lazy import LazyValue
from vime_optim.optimizer.slots import RemainderSlot, ScaledSlot, Slot
from vime_optim.simulate import device as simulated
from vime_optim.simulate.float8 import Float8Quantizer
from vime_optim.tools.bits import same_bits

NUMEL = 1000


class FakeFused:
    """Just enough of FusedAdam for slots: states, scales, and the value of one."""

    def __init__(self, param: torch.Tensor, coded: torch.Tensor) -> None:
        self.state = {param: {"master_param": coded, "exp_avg": coded}}
        self._scales = {param: {"exp_avg": torch.tensor([0.37])}}

    def get_unscaled_state(self, param: torch.Tensor, name: str) -> torch.Tensor:
        coded = self.state[param][name]
        value = coded.float()
        return value.mul_(self._scales[param][name]) if coded.dtype == torch.float16 else value


def remainder() -> Slot:
    param = torch.zeros(NUMEL, dtype=torch.bfloat16)
    slot = RemainderSlot(FakeFused(param, torch.zeros(NUMEL, dtype=torch.int16)), param)
    slot.write(torch.randn(NUMEL))
    return slot


def scaled() -> Slot:
    param = torch.nn.Parameter(torch.zeros(NUMEL))
    return ScaledSlot("exp_avg", FakeFused(param, torch.randn(NUMEL).half()), param)


def float8() -> Slot:
    param = torch.nn.Parameter(torch.zeros(NUMEL))
    coded = Float8Quantizer(torch.device("cpu")).make_empty(torch.Size([NUMEL]))
    coded.copy_(torch.randn(NUMEL))
    return ScaledSlot("exp_avg", FakeFused(param, coded), param)


SLOTS = pytest.mark.parametrize("make", [remainder, scaled, float8])


@SLOTS
def test_it_is_a_tensor_for_everybody(make: Any) -> None:
    slot = make()
    expected = slot.read()[10:30].reshape(4, 5).clone()
    value = LazyValue(slot, 10, (4, 5))

    assert (value.shape, value.dtype, value.numel()) == (expected.shape, torch.float32, 20)
    assert same_bits(torch.zeros(4, 5).copy_(value), expected)
    assert same_bits(value.clone(), expected)
    assert same_bits(value.reshape(-1), expected.reshape(-1))
    assert same_bits(copy.deepcopy(value), expected)
    assert same_bits(pickle.loads(pickle.dumps(value)), expected)
    kept = value.detach()
    assert isinstance(kept, LazyValue)
    assert same_bits(kept.decode(), expected)
    for write in (
        value.zero_,
        lambda: torch.add(expected, 1, out=value),
        lambda: torch._foreach_add_([value], 1.0),
    ):
        with pytest.raises(RuntimeError, match="decoded when read"):
            write()


def test_a_queue_sends_it_as_a_tensor() -> None:
    """torch refuses to send a device's storage by itself, which is what pickle makes of it."""
    slot = scaled()
    sent = bytes(ForkingPickler.dumps(LazyValue(slot, 0, (NUMEL,))))
    assert b"torch._utils" not in sent
    assert same_bits(pickle.loads(sent), slot.read())


def test_it_stays_on_its_device() -> None:
    """Also where nothing says that the slot's tensor stands for device memory."""
    simulated.enable()
    try:
        param = torch.nn.Parameter(torch.zeros(NUMEL, device="cuda"))
        coded = torch.randn(NUMEL).half().to("cuda")
        value = LazyValue(ScaledSlot("exp_avg", FakeFused(param, coded), param), 0, (NUMEL,))
        with torch._C.DisableTorchFunction():
            assert value.device.type == value.detach().device.type == "cuda"
    finally:
        simulated.disable()


def test_it_follows_its_state() -> None:
    slot = remainder()
    value = LazyValue(slot, 0, (NUMEL,))
    slot.write(torch.ones(NUMEL))
    assert same_bits(value.decode(), torch.ones(NUMEL))


@SLOTS
def test_a_file_holds_the_value(make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fastfile, "WINDOW_BYTES", 256)
    slot = make()
    parts = [(0, (7, 3)), (21, (0,)), (21, (NUMEL - 21,))]
    lazy = [LazyValue(slot, start, shape) for start, shape in parts]
    plain = [value.decode() for value in lazy]

    extents, record = fastfile.write_file(tmp_path / "lazy", "x", list(lazy))
    expected, _ = fastfile.write_file(tmp_path / "plain", "x", list(plain))

    assert extents == expected
    size = record.size_bytes - fastfile.TRAILER_BYTES
    assert (tmp_path / "lazy").read_bytes()[:size] == (tmp_path / "plain").read_bytes()[:size]
    assert fastfile.digest_file(tmp_path / "lazy").chunk_digests == record.chunk_digests


@pytest.mark.parametrize(
    ("release", "backend"), [("0.15.3", "rem"), ("0.19.2", "m=fp16,v=fp16"), ("0.19.2", "rem")]
)
def test_a_save_decodes_block_by_block(release: str, backend: str, phases: Phases) -> None:
    """Nothing between the build and the file touches the values, and the build takes no memory."""
    case = Case.parse(f"{release},fused,pao,{backend},dp=2")
    answers = phases.run("tests.reshard.lazy_job:save", case)
    for answer in answers:
        assert answer["made"] > 0
        assert answer["blocks"] > 0
        assert answer["decoded"] == 0
        assert answer["build_bytes"] == 0

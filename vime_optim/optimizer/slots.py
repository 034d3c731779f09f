"""One state of one parameter shard: where it is stored, how to read and write its value.

The canonical value of every state is float32. A *direct* slot stores exactly that value (perhaps
in bfloat16, which float32 holds exactly), so its tensor can be saved as it is and loaded into. A
coded slot (scaled float16 or float8, or the 16 low bits of a master parameter) is converted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from vime_optim.errors import OptimizerStateError
from vime_optim.optimizer.kinds import (
    MASTER,
    STATE_MASTER,
    counts_steps,
    is_hybrid,
    is_precision_aware,
    is_transformer_engine,
    optimizer_param,
    param_name,
)


class Slot:
    """A state stored as its value. `tensor` is 1-D, any device; `mirrors` must follow it."""

    def __init__(
        self, name: str, tensor: torch.Tensor, mirrors: tuple[torch.Tensor, ...] = ()
    ) -> None:
        self.name = name
        self.tensor = tensor
        self.mirrors = mirrors

    @property
    def numel(self) -> int:
        return self.tensor.numel()

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    def direct(self) -> torch.Tensor | None:
        """The storage itself, 1-D and contiguous, or None when the state is coded."""
        return self.tensor.detach()

    def read(self) -> torch.Tensor:
        """The value as float32; may share the storage."""
        return self.read_range(0, self.numel)

    @property
    def is_read_whole(self) -> bool:
        """True when reading a part costs as much as reading all of it."""
        return False

    def read_range(self, start: int, end: int) -> torch.Tensor:
        """Elements [start, end) of the value, as float32; may share the storage."""
        return self.tensor.detach()[start:end].float()

    def write(self, value: torch.Tensor) -> None:
        """Store `value` (1-D, any floating dtype and device) in place."""
        if self.tensor.data_ptr() != value.data_ptr() or self.tensor.dtype != value.dtype:
            self.tensor.detach().copy_(value)
        self.settle()

    def settle(self) -> None:
        """Bring every copy of the state in line, after the storage was written in place."""
        for mirror in self.mirrors:
            mirror.detach().copy_(self.tensor.detach())


class ScaledSlot(Slot):
    """A state that Transformer Engine keeps in float16 or float8 with one scale per tensor."""

    def __init__(self, name: str, optimizer: Any, param: torch.Tensor) -> None:
        self.state_name = STATE_MASTER if name == MASTER else name
        super().__init__(name, optimizer.state[param][self.state_name])
        self.optimizer = optimizer
        self.param = param

    def direct(self) -> torch.Tensor | None:
        return None

    def read(self) -> torch.Tensor:
        value: torch.Tensor = self.optimizer.get_unscaled_state(self.param, self.state_name)
        return value.detach()

    @property
    def is_read_whole(self) -> bool:
        return self.tensor.dtype != torch.float16

    def read_range(self, start: int, end: int) -> torch.Tensor:
        if self.is_read_whole:
            return self.read()[start:end]
        # As FusedAdam does it: one scale for the whole tensor.
        scale = self.optimizer._scales[self.param][self.state_name]
        return self.tensor.detach()[start:end].float().mul_(scale)

    def write(self, value: torch.Tensor) -> None:
        """Store `value`, rounded to the nearest code under the tensor's scale.

        A value that was read from codes of one scale is stored back as the very same codes: the
        scale that FusedAdam recomputes may be off by a last bit, so its neighbours are tried too.
        """
        exact = value.detach().to(device=self.tensor.device, dtype=torch.float32)
        # FusedAdam scales its argument in place, hence the copies.
        self.optimizer.set_scaled_state(self.param, self.state_name, exact.clone())
        if self._holds(exact):
            return
        scale = self.optimizer._scales[self.param][self.state_name]
        first = float(scale.item())
        for candidate in _neighbours(first):
            self._store(exact, candidate)
            if self._holds(exact):
                return
        self._store(exact, first)

    def _holds(self, value: torch.Tensor) -> bool:
        return bool(torch.equal(self.read(), value))

    def _store(self, value: torch.Tensor, scale_value: float) -> None:
        scale = self.optimizer._scales[self.param][self.state_name]
        scale.fill_(scale_value)
        quantizer = getattr(self.tensor, "_quantizer", None)
        if quantizer is not None:
            quantizer.scale.copy_(1 / scale)
            self.tensor.copy_(value)
        else:
            self.tensor.copy_(value * (scale.reciprocal() if scale_value > 0 else 0.0))


def master_of(param: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The float32 master of a bfloat16 parameter and its int16 remainder, both 1-D.

    What RemainderSlot says, ((p - (r < 0)) << 16) | (r & 0xFFFF), is p * 2**16 + r modulo 2**32,
    which needs no temporaries.
    """
    bits = param.detach().contiguous().view(torch.int16).to(torch.int32)
    return bits.bitwise_left_shift_(16).add_(remainder.detach()).view(torch.float32)


_BLOCK_NUMEL = 1 << 24


def blocks(flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views of a 1-D tensor, small enough that temporaries of their size do not matter."""
    return torch.split(flat, _BLOCK_NUMEL)


class RemainderSlot(Slot):
    """A float32 master parameter kept as its bfloat16 parameter and 16 more bits.

    Source: Transformer Engine's remainder kernel. With p the bits of the bfloat16 parameter and r
    the signed remainder, the master's bits are ((p - (r < 0)) << 16) | (r & 0xFFFF).
    """

    def __init__(self, optimizer: Any, param: torch.Tensor) -> None:
        super().__init__(MASTER, optimizer.state[param][STATE_MASTER])
        self.param = param

    def direct(self) -> torch.Tensor | None:
        return None

    def read_range(self, start: int, end: int) -> torch.Tensor:
        return master_of(self.param[start:end], self.tensor[start:end])

    def write(self, value: torch.Tensor) -> None:
        self.write_and_compare(value)

    def write_and_compare(self, value: torch.Tensor) -> bool:
        """Store a master (float32), or bare remainders (int16) as dp_reshardable keeps them.

        Exact whenever the bfloat16 parameter is the master rounded as Transformer Engine rounds:
        half away from zero. A parameter that was rounded half to even (by torch, under another
        backend) cannot code a master that lies exactly between two parameters; there the
        parameter stays and the master loses one unit in its last place.

        Returns:
            True when that changed a bit of the bfloat16 parameter.
        """
        if value.dtype == torch.int16:
            self.tensor.detach().copy_(value)
            return False
        params = self.param.detach().view(torch.int16)
        parts = map(blocks, (value.detach(), params, self.tensor.detach()))
        return any([_write_block(*part) for part in zip(*parts, strict=True)])


def _write_block(value: torch.Tensor, stored: torch.Tensor, coded: torch.Tensor) -> bool:
    """RemainderSlot.write_and_compare of a block: masters, bits of parameters, remainders."""
    bits = value.to(device=coded.device, dtype=torch.float32).contiguous().view(torch.int32)
    remainder = bits.to(torch.int16)  # keeps the low 16 bits
    wanted = ((bits >> 16) + (remainder < 0).to(torch.int32)).to(torch.int16)
    between = (remainder == -0x8000) & (wanted - stored == 1)
    remainder.masked_fill_(between, 0x7FFF)
    wanted = torch.where(between, stored, wanted)
    coded.copy_(remainder)
    moved = not torch.equal(stored, wanted)
    if moved:
        # Not the parameters that belong to these masters: the masters decide.
        stored.copy_(wanted)
    return moved


def _neighbours(scale: float) -> list[float]:
    one = torch.tensor(scale, dtype=torch.float32)
    up, down = [], []
    higher = lower = one
    for _ in range(3):
        higher = torch.nextafter(higher, torch.tensor(math.inf))
        lower = torch.nextafter(lower, torch.tensor(0.0))
        up.append(float(higher))
        down.append(float(lower))
    return [value for pair in zip(up, down, strict=True) for value in pair if value > 0]


def slots_of(dist_opt: Any, model_param: torch.Tensor) -> dict[str, Slot]:
    """State name ('param', 'exp_avg', 'exp_avg_sq', ...) to slot, for this rank's shard.

    `step` is not among them: it is a counter, not param state. An optimizer that keeps no state at
    all has its master alone.

    Raises:
        OptimizerStateError: the inner optimizer holds no state for the parameter.
    """
    inner = dist_opt.optimizer
    param = optimizer_param(dist_opt, model_param)
    state: Mapping[str, Any] = inner.state.get(param, {})
    moments = [
        name
        for name, value in state.items()
        if name not in ("step", STATE_MASTER)
        and isinstance(value, torch.Tensor)
        and value.numel() == param.numel()
    ]
    if not moments and (counts_steps(inner) or any(inner.state.values())):
        raise OptimizerStateError(
            "the optimizer holds no state for a parameter",
            where=param_name(dist_opt, model_param),
            got=f"state keys {sorted(map(str, state))}",
            expected="moments such as exp_avg and exp_avg_sq",
            next_step="save after the first step, or report this optimizer to vime_optim",
        )
    slots: dict[str, Slot] = {MASTER: master_slot(dist_opt, model_param)}
    for name in moments:
        slots[name] = _moment_slot(inner, param, name)
    return slots


def master_slot(dist_opt: Any, model_param: torch.Tensor) -> Slot:
    """The float32 master parameter of this rank's shard, wherever the backend keeps it."""
    inner = dist_opt.optimizer
    param = optimizer_param(dist_opt, model_param)
    if is_hybrid(inner):
        held = inner.param_to_inner_param[param]
        if held is param:
            return Slot(MASTER, param)
        # Without PAO the device keeps a float32 copy of the master, refreshed after each step.
        return Slot(MASTER, held, (param,) if param.dtype == torch.float32 else ())
    if not is_precision_aware(dist_opt) or not is_transformer_engine(inner):
        return Slot(MASTER, param)
    stored = inner.state[param].get(STATE_MASTER)
    if stored is None:
        return Slot(MASTER, param)
    if param.dtype == torch.float32:
        # FusedAdam updates a float32 parameter itself; its master_param is made once and is stale.
        mirror = (stored,) if stored.dtype == torch.float32 else ()
        return Slot(MASTER, param, mirror)
    if stored.dtype == torch.int16:
        return RemainderSlot(inner, param)
    if stored.dtype == torch.float32:
        return Slot(MASTER, stored)
    return ScaledSlot(MASTER, inner, param)


def _moment_slot(inner: Any, param: torch.Tensor, name: str) -> Slot:
    stored = inner.state[param][name]
    if is_transformer_engine(inner):
        # A float8 state is a tensor of its own kind that passes for float32.
        coded = getattr(inner, "name_to_dtype_map", {}).get(name, stored.dtype)
        if coded in (torch.float16, torch.uint8):
            return ScaledSlot(name, inner, param)
    return Slot(name, stored)

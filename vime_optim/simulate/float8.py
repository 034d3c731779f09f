"""An FP8 (E4M3) tensor with one scale, as FusedAdam uses Transformer Engine's Float8Tensor.

Outwardly an fp32 tensor; inwardly uint8 codes and the inverse of the scale they were coded with.
"""

from __future__ import annotations

from typing import Any

import torch

E4M3_MAX = 448.0


class Float8Quantizer:
    """Scale (fp32, shape [1]) to multiply with before coding; amax is the largest value coded."""

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.ones([1], dtype=torch.float32, device=device)
        self.amax = torch.zeros([1], dtype=torch.float32, device=device)

    def make_empty(self, shape: torch.Size) -> Float8Tensor:
        data = torch.zeros(shape, dtype=torch.uint8, device=self.scale.device)
        return Float8Tensor(data, torch.ones_like(self.scale), self)


class Float8Tensor(torch.Tensor):
    """Wrapper over `_data` (uint8) and `_scale_inv` (fp32 [1])."""

    _data: torch.Tensor
    _scale_inv: torch.Tensor
    _quantizer: Float8Quantizer

    @staticmethod
    def __new__(
        cls, data: torch.Tensor, scale_inv: torch.Tensor, quantizer: Float8Quantizer
    ) -> Float8Tensor:
        # The wrapper owns no memory; its device is answered from `_data` (see memory.memory_of).
        wrapper: Float8Tensor = torch.Tensor._make_wrapper_subclass(
            cls, data.shape, dtype=torch.float32, device=torch.device("cpu")
        )
        wrapper._data = data
        wrapper._scale_inv = scale_inv
        wrapper._quantizer = quantizer
        return wrapper

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_data", "_scale_inv"], self._quantizer

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Float8Tensor({self.dequantize()})"

    def dequantize(self) -> torch.Tensor:
        """A new fp32 tensor."""
        return self._data.view(torch.float8_e4m3fn).to(torch.float32) * self._scale_inv

    def quantize_(self, values: torch.Tensor) -> Float8Tensor:
        """Codes fp32 values with the quantizer's scale; out-of-range values saturate."""
        scaled = values.to(torch.float32) * self._quantizer.scale
        codes = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        self._data.copy_(codes.view(torch.uint8))
        self._scale_inv.copy_(self._quantizer.scale.reciprocal())
        if values.numel():
            self._quantizer.amax.copy_(values.abs().amax())
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default and isinstance(args[0], Float8Tensor):
            source = args[1]
            values = source.dequantize() if isinstance(source, Float8Tensor) else source
            return args[0].quantize_(values)
        if func is torch.ops.aten.detach.default:
            held = args[0]
            return Float8Tensor(held._data, held._scale_inv, held._quantizer)
        # Any other operator reads the values.
        plain = [a.dequantize() if isinstance(a, Float8Tensor) else a for a in args]
        return func(*plain, **(kwargs or {}))

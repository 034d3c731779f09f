"""The two torch modes of the simulation.

`DeviceArguments` sees Python-level calls and stands in for everything that names a device: factory
functions, `.to()`, `.cuda()`, `.device`, pinning. `Inheritance` sees every operator below autograd,
in backward too, and hands the device tag on from inputs to fresh outputs.

torch switches the first mode off while one of its own Python-written functions runs (a deepcopy,
say), so anything in there sees plain CPU tensors throughout; the second mode stays on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from vime_optim.simulate.memory import (
    Memory,
    is_device_tensor,
    memory_of,
    overrides_dispatch,
    raw_storage_of,
    set_memory,
    set_storage_memory,
    storage_memory,
    storage_of,
)

CUDA = torch.device("cuda", 0)
_PIN_FAILS = False

# Operators that torch allows to mix host and device tensors.
_MIXING = {
    "copy_",
    "set_",
    "index",
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "_foreach_copy_",
}
_MIXING |= {"_unsafe_index", "_unsafe_index_put", "_has_compatible_shallow_copy_type"}
# Their results are filled from the host by torch itself.
_NAMESPACES_LEFT_ALONE = {"c10d", "_c10d_functional", "profiler"}


def set_pin_fails(fails: bool) -> None:
    global _PIN_FAILS
    _PIN_FAILS = fails


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def requested_memory(device: object) -> Memory | None:
    """Device memory or host memory; None for meta and other kinds that are passed through.

    Raises:
        RuntimeError: torch does not know the device (as torch itself says it).
    """
    if isinstance(device, int) and not isinstance(device, bool):
        return "device"
    kind = torch.device(device).type if isinstance(device, str) else getattr(device, "type", None)
    if kind == "cuda":
        return "device"
    return "host" if kind == "cpu" else None


def _check_can_pin() -> None:
    if _PIN_FAILS:
        raise RuntimeError("Cannot access accelerator device when none is available.")


def move(tensor: torch.Tensor, memory: Memory, **kwargs: Any) -> torch.Tensor:
    """`tensor.to(...)` with the device given as a memory. kwargs: dtype, copy, memory_format."""
    held = memory_of(tensor)
    crosses = (held == "device") != (memory == "device")
    if crosses:
        kwargs["copy"] = True
    kwargs.setdefault("dtype", tensor.dtype)
    result = tensor.to(**kwargs)
    if result is not tensor and storage_of(result) is not storage_of(tensor):
        set_memory(result, memory)
    return result


def _parse_to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The overloads of Tensor.to, as keywords: device, dtype, non_blocking, copy, memory_format."""
    parsed = dict(kwargs)
    rest = list(args)
    first = rest[0] if rest else parsed.pop("other", None)
    if isinstance(first, torch.Tensor):
        rest = rest[1:]
        memory = memory_of(first)
        parsed["device"] = CUDA if memory == "device" else first.device
        parsed["dtype"] = first.dtype
    elif isinstance(first, torch.dtype):
        parsed["dtype"] = rest.pop(0)
    elif rest:
        parsed["device"] = rest.pop(0)
        if rest and (rest[0] is None or isinstance(rest[0], torch.dtype)):
            parsed["dtype"] = rest.pop(0)
    for name, value in zip(("non_blocking", "copy"), rest, strict=False):
        parsed[name] = value
    return parsed


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    parsed = _parse_to(args, kwargs)
    device = parsed.pop("device", None)
    held = memory_of(tensor)
    wanted: Memory | None = held if device is None else requested_memory(device)
    if wanted is None or storage_of(tensor) is None:
        return tensor.to(*args, **kwargs)
    non_blocking = parsed.pop("non_blocking", False)
    if parsed.get("dtype", ...) is None:
        del parsed["dtype"]
    if wanted != "device" and held == "device" and non_blocking:
        # torch allocates the destination of a non-blocking copy to the host as pinned memory.
        _check_can_pin()
        wanted = "pinned"
    elif wanted == "pinned":
        wanted = "host"
    return move(tensor, wanted, **parsed)


def _cuda(
    tensor: torch.Tensor, device: object = None, non_blocking: bool = False, **kwargs: Any
) -> torch.Tensor:
    return _to(tensor, CUDA if device is None else device, non_blocking=non_blocking, **kwargs)


def _cpu(tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return _to(tensor, "cpu", **kwargs)


def _pin_memory(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
    memory = memory_of(tensor)
    if memory == "device":
        kind = _type(tensor)
        raise RuntimeError(f"cannot pin '{kind}' only dense CPU tensors can be pinned")
    if memory == "pinned":
        return tensor
    _check_can_pin()
    result = tensor.clone()
    set_memory(result, "pinned")
    return result


def _is_pinned(tensor: torch.Tensor, device: object = None) -> bool:
    return memory_of(tensor) == "pinned"


def _type(tensor: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    if dtype is None:
        name = tensor.type()
        return name.replace("torch.", "torch.cuda.", 1) if is_device_tensor(tensor) else name
    if isinstance(dtype, torch.dtype):
        return _to(tensor, dtype=dtype)
    name = dtype if isinstance(dtype, str) else f"{dtype.__module__}.{dtype.__name__}"
    on_device = name.startswith("torch.cuda.")
    element = tensor.new_empty(0).type(name.replace("torch.cuda.", "torch.")).dtype
    return _to(tensor, CUDA if on_device else "cpu", dtype=element)


def _device(tensor: torch.Tensor) -> torch.device:
    return CUDA if is_device_tensor(tensor) else tensor.device


def _get_device(tensor: torch.Tensor) -> int:
    return 0 if is_device_tensor(tensor) else tensor.get_device()


def _is_cpu(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_cpu) and not is_device_tensor(tensor)


def _is_cuda(tensor: torch.Tensor) -> bool:
    return is_device_tensor(tensor)


def _refuse_device(original: Callable[..., Any]) -> Callable[..., Any]:
    def numpy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_device_tensor(tensor) and not kwargs.get("force", False):
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the "
                "tensor to host memory first."
            )
        return original(tensor, *args, **kwargs)

    return numpy


def _set_grad(tensor: torch.Tensor, grad: torch.Tensor | None) -> None:
    if grad is not None and is_device_tensor(tensor) != is_device_tensor(grad):
        raise RuntimeError(
            "attempting to assign a gradient with device type "
            f"'{_device(grad).type}' to a tensor with device type '{_device(tensor).type}'. "
            "Please ensure that the gradient and the tensor are on the same device"
        )
    tensor.grad = grad


class DeviceArguments(TorchFunctionMode):
    """Answers calls that name, read or change a device."""

    def __init__(self) -> None:
        super().__init__()
        self._handlers: dict[Any, Callable[..., Any]] = {
            torch.Tensor.to: _to,
            torch.Tensor.cuda: _cuda,
            torch.Tensor.cpu: _cpu,
            torch.Tensor.pin_memory: _pin_memory,
            torch.Tensor.is_pinned: _is_pinned,
            torch.Tensor.type: _type,
            torch.Tensor.numpy: _refuse_device(torch.Tensor.numpy),
            torch.Tensor.__array__: _refuse_device(torch.Tensor.__array__),
            torch.Tensor.grad.__set__: _set_grad,  # type: ignore[union-attr]
        }
        # These answer for wrapper subclasses too; the others leave those to the subclass.
        self._readers: dict[Any, Callable[..., Any]] = {
            torch.Tensor.get_device: _get_device,
            torch.Tensor.device.__get__: _device,
            torch.Tensor.is_cuda.__get__: _is_cuda,  # type: ignore[attr-defined]
            torch.Tensor.is_cpu.__get__: _is_cpu,  # type: ignore[attr-defined]
        }
        self._handlers.update(self._readers)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        handler = self._handlers.get(func)
        if handler is not None:
            wrapped = args and overrides_dispatch(type(args[0])) and func not in self._readers
            return func(*args, **kwargs) if wrapped else handler(*args, **kwargs)
        if kwargs.get("device") is not None or kwargs.get("pin_memory"):
            return self._create(func, args, kwargs)
        return func(*args, **kwargs)

    def _create(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs a function that takes a device or pin_memory on the CPU, and tags what it made."""
        kwargs = dict(kwargs)
        pinned = kwargs.pop("pin_memory", False)
        device = kwargs.get("device")
        memory = None if device is None else requested_memory(device)
        if device is not None and memory is None:
            return func(*args, **kwargs)
        if pinned:
            if memory == "device":
                raise RuntimeError("Only dense CPU tensors can be pinned")
            _check_can_pin()
            memory = "pinned"
        if device is not None:
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        return self._place(func, result, args, memory or "host")

    def _place(
        self, func: Callable[..., Any], result: Any, args: tuple[Any, ...], memory: Memory
    ) -> Any:
        if not isinstance(result, torch.Tensor) or memory_of(result) == memory:
            return result
        aliases = func in (torch.as_tensor, torch.asarray)
        if aliases and (memory == "device" or is_device_tensor(result)):
            return move(result, memory)
        if not aliases:
            set_memory(result, memory)
        return result


class Inheritance(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fresh results of an operator on device tensors are device tensors."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would wrap the method below in a way that imports torch._dynamo: seconds, for what
        # is never compiled.
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(cls, "__tensor_flatten__") for cls in types):
            return (
                NotImplemented  # a wrapper (DTensor) unwraps itself; its inner operators come here
            )
        result = func(*args, **kwargs)
        if func.namespace in _NAMESPACES_LEFT_ALONE:
            return result
        with torch._C.DisableTorchFunction():
            self._inherit(func, [*_tensors(args), *_tensors(tuple(kwargs.values()))], result)
        return result

    def _inherit(self, func: Any, inputs: list[torch.Tensor], result: Any) -> None:
        storages = [raw_storage_of(tensor) for tensor in inputs]
        on_device = [storage_memory(storage) == "device" for storage in storages]
        if not any(on_device):
            return
        if not all(on_device) and func.overloadpacket.__name__ not in _MIXING:
            self._check_mix(func, inputs, on_device)
        for tensor in _tensors(result):
            storage = raw_storage_of(tensor)
            if storage is not None and not any(storage is held for held in storages):
                set_storage_memory(storage, "device")

    def _check_mix(self, func: Any, inputs: list[torch.Tensor], on_device: list[bool]) -> None:
        for tensor, device in zip(inputs, on_device, strict=True):
            if not device and tensor.dim() > 0 and raw_storage_of(tensor) is not None:
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two "
                    f"devices, cuda:0 and cpu! (when calling {func})"
                )

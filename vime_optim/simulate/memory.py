"""Which memory a storage stands for, kept on the storage itself.

torch keeps one Python object for the whole life of a storage (its attributes survive even when no
Python reference is left and the C++ side alone holds it), so an attribute can neither outlive its
storage nor be read through another one that happens to reuse the address. Views share the storage
and hence the tag; `.data =` and `set_` swap the storage and hence the tag.
"""

from __future__ import annotations

import weakref
from typing import Literal

import torch

Memory = Literal["host", "pinned", "device"]

_ATTRIBUTE = "_vime_optim_memory"


class Ledger:
    """Bytes of simulated device memory in use, as torch.cuda.memory_allocated would count them.

    A storage counts from the moment it becomes device memory until it is freed, by its current
    size: resize_ is noticed at the next reading.
    """

    def __init__(self) -> None:
        self._bytes_of: dict[int, int] = {}
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._current_bytes = 0
        self.peak_bytes = 0

    @property
    def current_bytes(self) -> int:
        return self._current_bytes

    def add(self, storage: torch.UntypedStorage) -> None:
        """Counts a storage, or its new size when it is counted already."""
        key = id(storage)
        if key not in self._refs:
            self._refs[key] = weakref.ref(storage, lambda _: self._forget(key))
        self._set(key, int(storage.nbytes()))

    def remove(self, storage: torch.UntypedStorage) -> None:
        self._forget(id(storage))

    def reset_peak(self) -> None:
        self.peak_bytes = self._current_bytes

    def _set(self, key: int, size_bytes: int) -> None:
        self._current_bytes += size_bytes - self._bytes_of.get(key, 0)
        self._bytes_of[key] = size_bytes
        self.peak_bytes = max(self.peak_bytes, self._current_bytes)

    def _forget(self, key: int) -> None:
        self._current_bytes -= self._bytes_of.pop(key, 0)
        self._refs.pop(key, None)


LEDGER = Ledger()


def overrides_dispatch(cls: type) -> bool:
    """True for tensor subclasses with operators of their own: DTensor, FakeTensor, quantized..."""
    if cls is torch.Tensor or cls is torch.nn.Parameter:
        return False
    return getattr(cls, "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The CPU storage behind a plain strided tensor; None for meta, fake, sparse and DTensor."""
    with torch._C.DisableTorchFunction():
        return raw_storage_of(tensor)


def raw_storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """storage_of, for callers in which torch functions are disabled already."""
    if overrides_dispatch(type(tensor)):
        return None
    if tensor.layout is not torch.strided or not tensor.is_cpu:
        return None
    return tensor.untyped_storage()


def storage_memory(storage: torch.UntypedStorage | None) -> Memory:
    """The memory that a storage stands for; untagged storages are host memory."""
    return getattr(storage, _ATTRIBUTE, "host")


def set_storage_memory(storage: torch.UntypedStorage, memory: Memory) -> None:
    if memory == "host":
        storage.__dict__.pop(_ATTRIBUTE, None)
    else:
        setattr(storage, _ATTRIBUTE, memory)
    if memory == "device":
        LEDGER.add(storage)
    else:
        LEDGER.remove(storage)


def memory_of(tensor: torch.Tensor) -> Memory:
    """The memory of a tensor; of its first inner tensor where it is a wrapper (DTensor, FP8)."""
    if overrides_dispatch(type(tensor)) and hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return memory_of(getattr(tensor, names[0]))
    return storage_memory(storage_of(tensor))


def set_memory(tensor: torch.Tensor, memory: Memory) -> None:
    """Tags a tensor's storage; tensors without a CPU storage are left alone."""
    storage = storage_of(tensor)
    if storage is not None:
        set_storage_memory(storage, memory)


def is_device_tensor(tensor: torch.Tensor) -> bool:
    return memory_of(tensor) == "device"

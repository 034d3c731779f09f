"""Which item goes to which file, and the tensors as they are: no copies of views.

Stands in for the body of Megatron's `prepare_write_data`, whose clone of every host view cannot be
reached from outside: it doubles the memory of a state that is written as views, and takes as long
as the write. A view needs no copy here because the file writer takes its bytes, not its storage.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
from types import ModuleType
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StoragePrefix
from torch.distributed.checkpoint.planner import WriteItemType

from vime_optim.writer.channel import ResultChannel

_BYTES_PER_FILE = 256 << 20  # below this, another file costs more than it brings
_MOST_FILES = 8


def with_own_names(plan: Any) -> Any:
    """The plan with names for its files that no other save has: `__<rank>_<random>_<n>.distcp`.

    Not even a writer that outlived its job then replaces a file of a later save to the directory.
    """
    prefix = f"{plan.storage_data.prefix}{secrets.token_hex(4)}_"
    return dataclasses.replace(plan, storage_data=_StoragePrefix(prefix))


def prepare_write_data(module: ModuleType, writer: Any, plan: Any, planner: Any) -> None:
    """Fill `writer.write_buckets` and `writer.results_queue`.

    Args:
        module: Megatron's filesystem_async, for its own ways to split the items.
        writer, plan, planner: as in `FileSystemWriterAsync.prepare_write_data`.
    """
    plan = with_own_names(plan)
    writer.thread_count = file_count(writer.thread_count, plan.items)
    bins = writer.thread_count
    if writer.separation_hint is not None:
        bins = max(1, writer.thread_count // 2)
    groups = module._split_by_separation_hint(
        module._split_by_size_and_type(bins, plan.items), writer.separation_hint
    )
    buckets: list[tuple[str, str, tuple[list[Any], list[Any]]]] = []
    for prefix, group in groups.items():
        for items in group:
            byte_items = []
            tensor_items = []
            for item in items:
                data = planner.resolve_data(item)
                if item.type == WriteItemType.BYTE_IO:
                    byte_items.append((item, data))
                else:
                    tensor_items.append((item, _as_written(data)))
            if byte_items or tensor_items:
                name = f"{prefix}{plan.storage_data.prefix}{len(buckets)}{DEFAULT_SUFFIX}"
                path = os.path.join(writer.checkpoint_dir, name)
                buckets.append((path, name, (byte_items, tensor_items)))
    writer.write_buckets = buckets
    writer.results_queue = ResultChannel() if buckets else None


def _as_written(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    # Quantized tensors (Transformer Engine's fp8) are written in high precision, as stock does.
    if tensor.device.type == "cuda" and "dequantize" in type(tensor).__dict__:
        return tensor.dequantize()
    return tensor


def file_count(stock: int, items: Any) -> int:
    """How many files, each with its own writer thread, one rank writes.

    More than stock's where there are enough bytes and processors for it.
    """
    total_bytes = sum(_item_bytes(item) for item in items)
    ranks_here = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))
    processors = len(os.sched_getaffinity(0)) // ranks_here
    most = max(stock, min(_MOST_FILES, processors))
    return max(stock, min(most, total_bytes // _BYTES_PER_FILE))


def _item_bytes(item: Any) -> int:
    if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
        return 0
    itemsize = torch.empty((), dtype=item.tensor_data.properties.dtype, device="meta").itemsize
    return int(item.tensor_data.chunk.sizes.numel()) * itemsize

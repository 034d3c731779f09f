"""Which item goes to which file, and the tensors as they are: no copies of views.

Stands in for the body of Megatron's and nvidia-resiliency-ext's `prepare_write_data`, whose clone
of every host view cannot be reached from outside: it doubles the memory of a state that is written
as views, and takes as long as the write. A view needs no copy here because the file writer takes
its bytes, not its storage. Bytes (common state, random generators) are pickled here, before the
save returns.
"""

from __future__ import annotations

import dataclasses
import heapq
import os
import queue
import secrets
from types import ModuleType
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StoragePrefix
from torch.distributed.checkpoint.planner import WriteItemType

from vime_optim.commit import task
from vime_optim.files.cores import own_cores
from vime_optim.optimizer.update_order import UpdateOrder, current_order

_BYTES_PER_FILE = 256 << 20  # below this, another file costs more than it brings
_MOST_FILES = 8
_OURS = "_vime_optim_buckets"


def with_own_names(plan: Any) -> Any:
    """The plan with names for its files that no other save has: `__<rank>_<random>_<n>.distcp`.

    Not even a writer that outlived its job then replaces a file of a later save to the directory.
    """
    prefix = f"{plan.storage_data.prefix}{secrets.token_hex(4)}_"
    return dataclasses.replace(plan, storage_data=_StoragePrefix(prefix))


class Buckets(list[task.WriteBucket]):
    """The files of a save, with the order of updates in which they were laid out."""

    def __init__(self, order: UpdateOrder) -> None:
        super().__init__()
        self.order = order


def prepare_write_data(module: ModuleType, writer: Any, plan: Any, planner: Any) -> None:
    """Split the items over files and keep that on the writer.

    Args:
        module: where the writer's class is defined, for its way to separate items by a hint.
        writer, plan, planner: as in `FileSystemWriterAsync.prepare_write_data`.
    """
    plan = with_own_names(plan)
    order = current_order()
    writer.thread_count = file_count(writer.thread_count, plan.items)
    bins = writer.thread_count
    if writer.separation_hint is not None:
        bins = max(1, writer.thread_count // 2)
    split = _split(plan.items, bins, planner, order)
    groups = {"": split}
    if writer.separation_hint is not None:
        groups = _separate(module, split, writer.separation_hint)
    buckets = Buckets(order)
    for prefix, group in groups.items():
        for pairs in group:
            if pairs:
                name = f"{prefix}{plan.storage_data.prefix}{len(buckets)}{DEFAULT_SUFFIX}"
                path = os.path.join(writer.checkpoint_dir, name)
                byte_pairs = [p for p in pairs if p[0].type == WriteItemType.BYTE_IO]
                tensor_pairs = [p for p in pairs if p[0].type != WriteItemType.BYTE_IO]
                buckets.append((path, name, (byte_pairs, tensor_pairs)))
    writer.write_buckets = buckets
    writer.has_data_to_write = bool(buckets)  # asked by nvidia-resiliency-ext from 0.5 on
    writer.results_queue = queue.Queue() if buckets else None
    setattr(writer, _OURS, True)


def save_function_and_args(writer: Any) -> Any:
    """What `get_save_function_and_args` returns for a writer that was prepared here, else None."""
    if not getattr(writer, _OURS, False):
        return None
    if not writer.write_buckets:
        return None, None, []
    arguments = [torch.distributed.get_rank(), writer.write_buckets, writer.results_queue]
    # Staged as they are: callers of Megatron's function may count on something to call.
    return task.run, lambda: writer.write_buckets, arguments


def _split(items: Any, bins: int, planner: Any, order: UpdateOrder) -> list[list[tuple[Any, Any]]]:
    """Spread the items over `bins` files by bytes, each file in the order of the next update: what
    is on a device first, as a unit that is written at a time is of one kind."""
    pairs = []
    for item in items:
        data = planner.resolve_data(item)
        position = (False, -1)
        if item.type != WriteItemType.BYTE_IO:
            data = _as_written(data)
            first = min(order.positions_of(data), default=len(order.owners))
            position = (data.device.type == "cpu", first)
        pairs.append((position, item, data))
    pairs.sort(key=lambda row: row[0])
    files: list[list[tuple[Any, Any]]] = [[] for _ in range(bins)]
    smallest = [(0, number) for number in range(bins)]
    for _, item, data in pairs:
        size, number = heapq.heappop(smallest)
        files[number].append((item, data))
        heapq.heappush(smallest, (size + _item_bytes(item), number))
    return files


def _separate(module: ModuleType, split: Any, hint: str) -> dict[str, Any]:
    data = {id(item): value for pairs in split for item, value in pairs}
    items = [[item for item, _ in pairs] for pairs in split]
    groups = module._split_by_separation_hint(items, hint)
    return {
        prefix: [[(item, data[id(item)]) for item in bucket] for bucket in group]
        for prefix, group in groups.items()
    }


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
    most = max(stock, min(_MOST_FILES, own_cores()))
    return max(stock, min(most, total_bytes // _BYTES_PER_FILE))


def _item_bytes(item: Any) -> int:
    if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
        return 0
    data = item.tensor_data
    return int(data.chunk.sizes.numel()) * int(data.properties.dtype.itemsize)

"""Handing a save to a worker: by reference under guard, by a staged copy, or inline at need."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from vime_optim import installer, settings
from vime_optim.reshard.lazy import LazyValue
from vime_optim.writer import guard, stage, task, watch
from vime_optim.writer.guard import InFlightSave, SharedMappings, is_host

logger = logging.getLogger(__name__)
Schedule = Callable[[Any, Any], None]
IsDone = Callable[..., bool]


def schedule_temporal(original: Schedule, caller: Any, request: Any) -> None:
    """Fork a writer. Host memory is copied on write, except what is mapped shared."""
    if request.async_fn is None:
        original(caller, request)
        return
    save = InFlightSave(request.call_idx, channel_of(request), watch.poll_temporal)
    mappings = SharedMappings()
    shared = [t for t in host_tensors_of(request) if mappings.contains(t)]
    request, by_reference = _stage(request, shared, save)
    if request.preload_fn is not None:
        request = request._replace(preload_fn=_keeping(request.preload_fn, save))
    original(caller, request)
    save.process = caller.process
    save.hold(by_reference)
    watch.saves_of(caller).append(save)
    guard.register(save)


def _keeping(preload: Callable[[], Any], save: InFlightSave) -> Callable[[], Any]:
    """Keep the staged buckets alive while the child reads them: pinned memory is shared with it,
    and a freed block is handed out again at once (up to 0.16 nothing kept them)."""

    def run() -> Any:
        buckets = preload()
        save.kept.append(buckets)
        return buckets

    return run


def schedule_persistent(original: Schedule, caller: Any, request: Any) -> None:
    """Send the save to the persistent worker, whose view of host tensors is the live memory."""
    if request.async_fn is None:
        original(caller, request)
        return
    request = _decoded(request)  # may find no memory: before anything counts this save
    watch.prepare_persistent(caller)
    poll = functools.partial(watch.poll_persistent, caller)
    save = InFlightSave(request.call_idx, channel_of(request), poll)
    save.process = watch.process_of(caller)
    watch.saves_of(caller).append(save)
    try:
        request, by_reference = _stage(request, host_tensors_of(request), save)
        _share(by_reference)
    except (RuntimeError, OSError) as error:
        _write_inline(request, save, error)
        return
    original(caller, request)
    save.process = watch.process_of(caller)
    save.hold(by_reference)
    guard.register(save)


def _share(tensors: list[torch.Tensor]) -> None:
    """Move storages to shared memory here and now. Left to the queue, this happens in its feeder
    thread, where a full /dev/shm is printed and forgotten while the trainer waits for ever."""
    needed_bytes = sum(
        storage.nbytes()
        for storage in {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values()
        if not storage.is_shared()
    )
    free_bytes = _free_shared_memory_bytes()
    if free_bytes is not None and needed_bytes > free_bytes:
        raise OSError(f"/dev/shm has {free_bytes} bytes free, the save needs {needed_bytes}")
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if not storage.is_shared():
            storage.share_memory_()


def _free_shared_memory_bytes() -> int | None:
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def _write_inline(request: Any, save: InFlightSave, error: Exception) -> None:
    """No shared memory: write here, while the training waits. Slow and exact."""
    logger.warning(
        "vime_optim: the host tensors cannot be handed to the checkpoint worker (%s); writing the"
        " checkpoint in the training process instead. Give the container more /dev/shm.",
        error,
    )
    installer.counters["saves written in the training process"] += 1
    arguments = list(request.async_fn_args)
    with task.written_here():
        if request.preload_fn is not None:
            arguments[1] = request.preload_fn()
        request.async_fn(*arguments, **(request.async_fn_kwargs or {}))
    save.mark_complete()


def _stage(
    request: Any, tensors: list[torch.Tensor], save: InFlightSave
) -> tuple[Any, list[torch.Tensor]]:
    """In 'stage' mode, put copies into the request. Returns it and what stays by reference."""
    if settings.current().async_mode != "stage" or not tensors:
        return request, tensors
    buffer = stage.buffer_of_process(settings.current().stage_bytes)
    copies = buffer.stage(tensors, save)
    save.kept.append(buffer)
    request = _mapped(request, copies)
    left = [t for t in tensors if id(t) not in copies]
    if left:
        installer.counters["tensors beyond the staging budget"] += len(left)
    return request, left


def channel_of(request: Any) -> Any:
    """The result channel among the arguments of a request, None for a foreign one."""
    arguments = request.async_fn_args
    return arguments[2] if len(arguments) > 2 else None


def tensors_of(request: Any) -> list[torch.Tensor]:
    """Every tensor that a request carries, each once."""
    found: dict[int, torch.Tensor] = {}
    _collect((request.async_fn, request.async_fn_args, request.preload_fn), found)
    return list(found.values())


def host_tensors_of(request: Any) -> list[torch.Tensor]:
    """Those in host memory."""
    return [t for t in tensors_of(request) if is_host(t) and not isinstance(t, LazyValue)]


def _decoded(request: Any) -> Any:
    """With coded states decoded: another process is sent memory, not what it would be made of."""
    values = {id(t): t.decode() for t in tensors_of(request) if isinstance(t, LazyValue)}
    return _mapped(request, values) if values else request


def _mapped(request: Any, tensors: dict[int, torch.Tensor]) -> Any:
    return request._replace(
        async_fn=map_tensors(request.async_fn, tensors),
        async_fn_args=map_tensors(request.async_fn_args, tensors),
        preload_fn=map_tensors(request.preload_fn, tensors),
    )


def _collect(obj: Any, found: dict[int, torch.Tensor]) -> None:
    if isinstance(obj, torch.Tensor):
        found[id(obj)] = obj
    elif isinstance(obj, functools.partial):
        _collect((obj.args, tuple(obj.keywords.values())), found)
    elif isinstance(obj, dict):
        _collect(tuple(obj.values()), found)
    elif isinstance(obj, (list, tuple)):
        for item in obj:
            _collect(item, found)


def map_tensors(obj: Any, copies: dict[int, torch.Tensor]) -> Any:
    """The same nest of containers and partials with some tensors replaced, by id.

    Lists are changed in place, so that everything that shares them sees the replacement and no
    other reference keeps the originals.
    """
    if isinstance(obj, torch.Tensor):
        return copies.get(id(obj), obj)
    if isinstance(obj, functools.partial):
        arguments = [map_tensors(argument, copies) for argument in obj.args]
        keywords = {key: map_tensors(value, copies) for key, value in obj.keywords.items()}
        return functools.partial(obj.func, *arguments, **keywords)
    if isinstance(obj, list):
        obj[:] = [map_tensors(item, copies) for item in obj]
        return obj
    if type(obj) is tuple:
        return tuple(map_tensors(item, copies) for item in obj)
    return obj


def is_done(original: IsDone, caller: Any, blocking: bool, no_dist: bool) -> bool:
    """Whether the oldest save of this caller is through on all ranks; waits when `blocking`."""
    saves = watch.saves_of(caller)
    if not saves:
        return original(caller, blocking, no_dist)
    save = saves[0]
    if blocking:
        watch.wait_until_complete(save)
    persistent = hasattr(caller, "cur_item")
    if persistent and save.poll() and caller.cur_item is None:
        # Megatron polls this field; a dead worker would leave it empty for ever.
        caller.cur_item = save.call_idx
    done = original(caller, blocking, no_dist)
    if done or (persistent and caller.cur_item is not None):
        if not persistent:
            save.poll()
        save.mark_complete()
    if done:
        saves.popleft()
    return done


def close_persistent(original: Callable[..., None], caller: Any, abort: bool) -> None:
    """Close without waiting for a dead worker."""
    process = getattr(caller, "process", None)
    if watch.is_dead(process):
        for save in watch.saves_of(caller):
            save.poll()
        watch.reset_persistent(caller)
        return
    if abort:
        for save in watch.saves_of(caller):
            save.fail("the save was aborted")
    original(caller, abort)
    if abort:
        for save in watch.saves_of(caller):
            save.mark_complete()
        watch.saves_of(caller).clear()


def discard_persistent(caller: Any) -> None:
    """The caller is being collected: end its worker, wait for nothing.

    Stock closes here and waits for an answer, which never comes when the queue's own thread is
    gone already. No save that is still in flight can be finalized any more.
    """
    for save in watch.saves_of(caller):
        save.fail("the caller that the save was handed to is gone")
        save.mark_complete()
    watch.saves_of(caller).clear()
    process = getattr(caller, "process", None)
    if process is None:
        return
    if process.is_alive():
        process.terminate()  # a worker of nvidia-resiliency-ext closes its device handles first
        process.join(timeout=5)
        if process.is_alive():
            process.kill()
    watch.forget_process(caller)

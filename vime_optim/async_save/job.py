"""One async save: threads write its files, and an update copies or waits for what it changes.

A thread a file takes its units in order and hands each to the kernel with one call. It does little
else in Python, because the training's own Python waits meanwhile.
"""

from __future__ import annotations

import functools
import itertools
import logging
import queue
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from vime_optim import settings
from vime_optim.async_save import stage
from vime_optim.async_save.stage import Room
from vime_optim.async_save.units import (
    COPIED,
    DONE,
    PENDING,
    TAKEN,
    FilePlan,
    Unit,
    plan_file,
)
from vime_optim.commit import task
from vime_optim.counters import counters
from vime_optim.files.fastfile import DigestingFile, FileRecord
from vime_optim.optimizer.update_order import Owner, UpdateOrder, tensors_in

logger = logging.getLogger(__name__)

_AHEAD_AFTER_S = 0.5  # after so long a save begins to copy device memory before an update asks
_SLOW_S = 1.0  # a save that needs longer than this from now on copies host memory, too
_LOOK_S = 0.5  # a wait looks this often whether the writers make progress
_UPDATED = (
    "a tensor was updated in place while its checkpoint was being written, by code that does not"
    " wait for the save; the checkpoint would be torn"
)


class SaveJob:
    """One save that is written by threads of this process.

    Args:
        rank: of this process; for the error.
        buckets: (path, name, (byte items, tensor items)) for each file.
        results: gets {file number: results} or an exception, once.
        order: who changes which of the memory, and when.
        call_idx: Megatron's number of the call.

    Attributes:
        over: nothing is read or written any more.
        waits_s: seconds that updates waited, by the first tensor that each waited for.
    """

    def __init__(
        self,
        rank: int,
        buckets: Sequence[Any],
        results: queue.Queue[Any],
        order: UpdateOrder,
        call_idx: int = 0,
    ) -> None:
        self.rank = rank
        self.call_idx = call_idx
        self.files = [plan_file(bucket, order) for bucket in buckets]
        self.waits_s: dict[str, float] = {}
        self.over = threading.Event()
        self._results_queue = results
        self._results: dict[int, Any] = {}
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._stop = False
        self._update_began = False
        self._running = len(self.files)
        self._threads: list[threading.Thread] = []
        self._previous: SaveJob | None = None
        self._began_s = self._progress_s = 0.0
        self._device: int | None = None
        # As the writers take them: all files at a time, each in the order of the update.
        rows = itertools.zip_longest(*(file.units for file in self.files))
        self.units = [unit for row in rows for unit in row if unit is not None]
        self.units.sort(key=lambda unit: unit.first_position)
        self._left_bytes = sum(unit.nbytes for unit in self.units)
        self._done_bytes = 0
        self._containers = order.containers
        self._of_owner = _units_of_owners(order.owners, self.units)
        # Kept alive: owners are told apart by id.
        self._owners = order.owners

    # The training thread.

    def start(self, previous: SaveJob | None) -> None:
        """Begin to write when `previous` is over. Tensors that no optimizer is known to own are
        copied before this returns, since nothing tells us when they change."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # what is queued may still write what is to be saved
            self._device = torch.cuda.current_device() if stage.uses_devices() else None
        self._previous = previous
        self._progress_s = time.monotonic()
        if not self.files:
            self._end()
            return
        everything = settings.current().async_mode == "stage"
        self._copy([unit for unit in self.units if everything or unit.unknown])
        for number in range(len(self.files)):
            self._spawn(self._write_file, number)
        self._spawn(self._get_ready)

    def _spawn(self, target: Any, *arguments: Any) -> None:
        name = f"vime_optim {target.__name__.strip('_')} {self.call_idx}"
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def before_owner(self, optimizer: Any, *, after: bool) -> None:
        """An optimizer is about to change what it owns. `after`: its step is done, and what follows
        it is about to change memory (see Owner)."""
        if self.over.is_set():
            return
        if after:
            self._update_began = False
        units = self._of_owner.get(Owner(optimizer, after).key)
        if units is None:
            if after or id(optimizer) in self._containers:
                return
            units = self._overlapping(tensors_in(optimizer))
        elif not after and not self._update_began:
            self._update_began = True  # the rest of the update is to come
            if self._is_slow():
                stage.copiers().submit(self._copy_ahead, self.units)
        self.settle(units)

    def _is_slow(self) -> bool:
        """Whether the rest takes more than _SLOW_S at the pace so far."""
        passed_s = time.monotonic() - self._began_s
        return self._left_bytes * passed_s > _SLOW_S * self._done_bytes

    def _copy_ahead(self, units: Iterable[Unit]) -> None:
        """Copy units that nobody has begun to read, one by one, while there is room."""
        for unit in units:
            if self._stop or self.over.is_set():
                return
            room = self._claim(unit)
            if room is not None:
                self._copy_one(unit, room)
            elif unit.state == PENDING:  # no room
                return

    def before_change(self, tensors: Iterable[torch.Tensor] | None) -> None:
        """These tensors (None: any) are about to change."""
        if not self.over.is_set():
            self.settle(self.units if tensors is None else self._overlapping(tensors))

    def _overlapping(self, tensors: Iterable[torch.Tensor]) -> list[Unit]:
        """Units not read yet that share memory with one of these tensors."""
        order = UpdateOrder()
        order.add(Owner(None, after=False), tensors)
        order.settle()
        unread = (unit for unit in self.units if unit.state in (PENDING, TAKEN))
        return [u for u in unread if any(order.positions_of(t) for t, _ in list(u.sources))]

    def settle(self, units: Sequence[Unit]) -> None:
        """Return when all `units` are copied or written, so that their memory may change."""
        unread = [unit for unit in units if unit.state in (PENDING, TAKEN)]
        if not unread:
            return
        began = time.monotonic()
        first = unread[0].names[0] if unread[0].names else ""
        while unread := self._copy(unread):
            with self._changed:
                if not any(unit.state not in (PENDING, TAKEN) for unit in unread):
                    self._changed.wait(_LOOK_S)
            if self.poll():
                break
        waited_s = time.monotonic() - began
        self.waits_s[first] = self.waits_s.get(first, 0.0) + waited_s
        counters["async save waits"] += 1
        counters["async save waits, milliseconds"] += round(1000 * waited_s)

    def _copy(self, units: Sequence[Unit]) -> list[Unit]:
        """Copy units that nobody has begun to read, while there is room. Last ones first, because
        the writers begin with the first. Returns those that are neither copied nor written."""
        copies = []
        for unit in reversed(units):
            room = self._claim(unit, force=unit.unknown and unit.on_device)
            if room is not None:
                copies.append(stage.copiers().submit(self._copy_one, unit, room))
        for copy in copies:
            copy.result()
        return [unit for unit in units if unit.state in (PENDING, TAKEN)]

    def _claim(self, unit: Unit, *, force: bool = False) -> Room | None:
        """Mark a unit as taken, so that no writer reads it, and get room for its copy; or None."""
        if unit.state != PENDING:
            return None
        room = stage.pool.take(unit.nbytes, unit.on_device, force=force)
        if room is None:
            return None
        with self._changed:
            if unit.state == PENDING:
                unit.state = TAKEN
                return room
        stage.pool.give(room)
        return None

    def _copy_one(self, unit: Unit, room: Room) -> None:
        try:
            with torch.no_grad():
                view = self._fill(unit, room)
            if unit.changed_in_place():
                raise RuntimeError(_UPDATED)
        except BaseException as error:
            stage.pool.give(room)
            self._fail(error)
            return
        counters["async save bytes copied"] += unit.nbytes
        with self._changed:
            unit.room = (room, view)
            unit.release()
            unit.state = COPIED
            self._progress_s = time.monotonic()
            self._changed.notify_all()

    def _fill(self, unit: Unit, room: Room) -> memoryview:
        if self._device is None or not unit.on_device:
            return unit.fill(room.buffer)
        torch.cuda.set_device(self._device)  # a new thread starts on device 0
        stream = _side_stream(self._device)
        with torch.cuda.stream(stream):
            view = unit.fill(room.buffer)
        stream.synchronize()
        return view

    # The writers' threads.

    def _write_file(self, number: int) -> None:
        plan = self.files[number]
        try:
            self._wait_for_previous()
            record = self._write_units(plan)
            self._results[number] = task.results_of(plan.pairs, plan.extents, plan.name, record)
        except BaseException as error:
            if isinstance(error, OSError) and error.filename is None:
                error.filename = plan.path
            self._fail(error)
        with self._changed:
            self._running -= 1
            last = not self._running
        if last:
            self._end()

    def _wait_for_previous(self) -> None:
        while self._previous is not None and not self._previous.over.wait(_LOOK_S):
            self._progress_s = time.monotonic()  # the older save's own time limit counts
            self._check_stop()
        self._previous = None
        self._began_s = self._began_s or time.monotonic()

    def _write_units(self, plan: FilePlan) -> FileRecord:
        with torch.no_grad(), DigestingFile(plan.path, beside=False) as file:
            for unit in plan.units:
                self._check_stop()
                self._write_unit(file, unit)
            return file.finish(plan.name)

    def _write_unit(self, file: DigestingFile, unit: Unit) -> None:
        with self._changed:
            while unit.state == TAKEN:  # is being copied
                self._changed.wait(_LOOK_S)
                self._check_stop()
            copied = unit.state == COPIED
            if not copied:
                unit.state = TAKEN
        room: Room | None = None
        try:
            if copied:
                room, view = unit.room
                file.write_vector([view])
            elif unit.direct:
                file.write_vector(unit.views())
            else:
                room = stage.pool.take(unit.nbytes, unit.on_device, force=True)
                assert room is not None
                view = self._fill(unit, room)
                file.write_vector([view])
        finally:
            if room is not None:
                stage.pool.give(room)
                unit.room = None
        if not copied and unit.changed_in_place():
            raise RuntimeError(_UPDATED)
        with self._changed:
            unit.release()
            unit.state = DONE
            self._done_bytes += unit.nbytes
            self._left_bytes -= unit.nbytes
            self._progress_s = time.monotonic()
            self._changed.notify_all()

    def _get_ready(self) -> None:
        """In a save that takes long, prepare for an update: copy device memory, last units first,
        and allocate the buffers that copies of the rest will need."""
        if self.over.wait(_AHEAD_AFTER_S):
            return
        self._copy_ahead(unit for unit in reversed(self.units) if unit.on_device)
        while self._is_slow() and not self._stop and not self.over.is_set():
            wanted = sum(unit.state == PENDING and not unit.on_device for unit in self.units)
            if stage.pool.free >= wanted or not stage.pool.make_ready():
                return

    # The end.

    def _check_stop(self) -> None:
        if self._stop:
            raise task.Stopped

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            # A write that was stopped because of another's failure is not the cause.
            if self._error is None or isinstance(self._error, task.Stopped):
                self._error = error
            self._stop = True
            self._changed.notify_all()

    def _end(self) -> None:
        """Publish the outcome, once."""
        with self._changed:
            if self.over.is_set():
                return
            if self._error is None:
                outcome: Any = dict(sorted(self._results.items()))
            else:
                outcome = task.as_error(self.rank, self._error)
            self._results_queue.put(outcome)
            for unit in self.units:
                if unit.state == COPIED:  # of a save that was given up
                    stage.pool.give(unit.room[0])
                    unit.room = None
                if unit.state != TAKEN:  # a thread that was left behind may still read it
                    unit.release()
            self.over.set()
            self._changed.notify_all()

    def poll(self) -> bool:
        """Whether it is over. A save without progress for VIME_OPTIM_WRITER_TIMEOUT_S is given up,
        its threads left behind: one that waits in the kernel cannot be ended."""
        limit_s = settings.current().writer_timeout_s
        silent_s = time.monotonic() - self._progress_s
        if not self.over.is_set() and silent_s > limit_s:
            self.abort(
                f"the checkpoint's writers made no progress for {silent_s:.0f} s"
                f" (VIME_OPTIM_WRITER_TIMEOUT_S={limit_s:g}) and were given up",
                wait_s=0.0,
            )
        return self.over.is_set()

    def wait(self) -> None:
        while not self.poll():
            self.over.wait(_LOOK_S)

    def abort(self, reason: str, wait_s: float = 5.0) -> None:
        """Stop writing; the save raises when it is finalized."""
        if self.over.is_set():
            return
        self._fail(RuntimeError(reason))
        deadline = time.monotonic() + wait_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._end()


def _units_of_owners(
    owners: Sequence[Owner], units: Sequence[Unit]
) -> dict[tuple[int, bool], list[Unit]]:
    found: dict[tuple[int, bool], list[Unit]] = {owner.key: [] for owner in owners}
    for unit in units:
        for position in unit.positions:
            found[owners[position].key].append(unit)
    return found


@functools.cache
def _side_stream(device: int) -> Any:
    """One for all threads, so that what they decode takes turns in the same device memory."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

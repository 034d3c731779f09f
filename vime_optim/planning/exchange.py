"""What ranks send to the coordinator while a save is planned: columns, or "the same as last time".

A plan that a rank sent before, and that every rank knows to have arrived, is sent again as its
digest; the coordinator holds the columns. Whether it arrived is known when all ranks agreed that
the planning went well, so that both sides forget together when it did not.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from vime_optim.errors import PlanError
from vime_optim.planning.packed import Boxes

_Key = tuple[int, ...]


@dataclass
class Session:
    """One call that plans a save, on this rank.

    Attributes:
        gathered: whether the ranks have exchanged their plans; from then on all of them come to
            the agreement at the end, whatever happens.
    """

    gathered: bool = False
    sent: dict[_Key, bytes] = field(default_factory=dict)
    received: dict[_Key, list[Any]] = field(default_factory=dict)


class _State(threading.local):
    session: Session | None = None


_state = _State()
_confirmed: dict[_Key, bytes] = {}
"""Digest of the plan that the coordinator holds of this rank, by group."""
_held: dict[_Key, list[Any]] = {}
"""On the coordinator: the plan of each rank, by group."""


@contextlib.contextmanager
def session() -> Iterator[Session]:
    """Opens a session; one inside another is the same session."""
    outer = _state.session
    inner = outer or Session()
    _state.session = inner
    try:
        yield inner
    finally:
        _state.session = outer


def confirm(done: Session) -> None:
    """All ranks agreed that planning went well: what was sent is held."""
    _confirmed.update(done.sent)
    _held.update(done.received)


def forget() -> None:
    """Planning failed, on every rank: nothing is taken as known any more."""
    _confirmed.clear()
    _held.clear()


class _Sent:
    """Pickled as bytes; unpickled, on the coordinator, it is the plan."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> Any:
        return _received, (self._data,)


def _received(data: bytes) -> Any:
    from vime_optim.planning.save_plans import PackedPlan

    plan = PackedPlan(Boxes.from_bytes(data))
    object.__setattr__(plan, "digest", _digest(data))
    return plan


@dataclass(frozen=True)
class _Same:
    """Stands for the plan with this digest, which the coordinator holds."""

    digest: bytes


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def gather_plans(original: Callable[[Any, Any], Any], wrapper: Any, plan: Any) -> Any:
    """`_DistWrapper.gather_object` of a SavePlan.

    Returns:
        The plans of all ranks on the coordinator, None elsewhere.

    Raises:
        PlanError: a rank says that its plan is held here, and it is not.
    """
    from vime_optim.planning.save_plans import pack_plan

    columns = pack_plan(plan)
    open_session = _state.session
    if columns is None or not wrapper.use_dist:
        gathered = original(wrapper, plan)
    else:
        gathered = original(wrapper, _outgoing(wrapper, columns, open_session))
    if columns is None and wrapper.use_dist and open_session is not None:
        # As with Megatron's cache of plans: the coordinator holds it instead of the last columns.
        open_session.sent[_key(wrapper)] = b""
    if open_session is not None:
        open_session.gathered = True
    if gathered is None:
        return None
    return _incoming(wrapper, gathered, open_session)


def _outgoing(wrapper: Any, columns: Boxes, open_session: Session | None) -> Any:
    data = columns.to_bytes()
    if open_session is None:
        return _Sent(data)
    key, digest = _key(wrapper), _digest(data)
    open_session.sent[key] = digest
    return _Same(digest) if _confirmed.get(key) == digest else _Sent(data)


def _incoming(wrapper: Any, gathered: list[Any], open_session: Session | None) -> list[Any]:
    key = _key(wrapper)
    held = _held.get(key, [None] * len(gathered))
    plans = [held[rank] if isinstance(plan, _Same) else plan for rank, plan in enumerate(gathered)]
    for rank, (plan, came) in enumerate(zip(plans, gathered, strict=True)):
        if isinstance(came, _Same) and getattr(plan, "digest", None) != came.digest:
            raise PlanError(
                "a rank's plan was taken as known and is not",
                where=f"rank {rank} of the saving group",
                expected="the plan of the last save",
                next_step="save again: every plan is then sent whole",
            )
    if open_session is not None:
        open_session.received[key] = plans
    return plans


def _key(wrapper: Any) -> _Key:
    import torch

    # torch 2.6 knows no ranks of None, which stands for all of them.
    group = torch.distributed.group.WORLD if wrapper.group is None else wrapper.group
    return (wrapper.coordinator_rank, *torch.distributed.get_process_group_ranks(group))


_last: tuple[list[Any], Any] | None = None
"""On the coordinator: plans, and the global plan that was made of these very objects."""


def whole_of(planner: Any, plans: Any) -> Any:
    """The global plan made from columns; None where torch's own code must make it."""
    global _last
    from vime_optim.planning.save_plans import PackedPlan
    from vime_optim.planning.whole import make_whole

    plain = not getattr(planner, "flatten_state_dict", True)
    plain = plain and not getattr(planner, "_enable_plan_caching", False)
    if not plain or not plans or any(type(plan) is not PackedPlan for plan in plans):
        return None
    if _last is not None and list(map(id, _last[0])) == list(map(id, plans)):
        return _last[1]
    whole = make_whole(plans)
    if whole is None or whole.verdict.unproved:
        return None
    _last = (list(plans), whole)
    return whole


def plan_together(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`save_state_dict_async_plan`, with a failure of any rank raised on all of them.

    Args:
        original: Megatron's or nvidia-resiliency-ext's; it takes the state dict, the writer and
            then the process group.

    Raises:
        PlanError: on every rank, when the plans do not fit together or a rank failed after they
            were exchanged.
    """
    from vime_optim.commit.agreement import agree, describe

    writer = args[1] if len(args) > 1 else kwargs.get("storage_writer")
    group = args[2] if len(args) > 2 else kwargs.get("process_group")
    error: BaseException | None = None
    result = None
    with session() as opened:
        try:
            result = original(*args, **kwargs)
        except Exception as caught:
            if not opened.gathered:
                raise  # the others still wait for this rank's plan: as stock does it
            error = caught
    if not opened.gathered:
        return result
    try:
        agree(
            None if error is None else describe(error),
            "this save could not be planned; no tensor was written",
            str(getattr(writer, "checkpoint_dir", "")),
            group,
            PlanError,
            "do all ranks run the same model and parallel layout?",
        )
    except PlanError as refused:
        forget()
        raise refused from error
    confirm(opened)
    if not (kwargs.get("cached_ckpt_structure") or kwargs.get("enable_cache")):
        _without_plans(result)
    return result


def _without_plans(result: Any) -> None:
    """Leaves the plans of all ranks out of `.metadata`: only a save that reuses plans needs them,
    and every rank would read them with each load."""
    saved = result[0] if isinstance(result[0], (tuple, list)) else result
    metadata = saved[1]
    if metadata is not None and hasattr(metadata, "all_local_plans"):
        del metadata.all_local_plans

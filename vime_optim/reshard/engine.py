"""Turns plans into Megatron's ShardedTensors over views of the optimizer's own tensors.

Save: each piece of the plan is a view of a master parameter or moment. Load: the same views are
where torch DCP writes what it reads; a coded state gets a placeholder and is read afterwards, one
shard at a time (coded.py). No tensor crosses ranks, except for a parameter that cannot be cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from vime_optim import collectives
from vime_optim.counters import counters
from vime_optim.files.lazy import LazyValue
from vime_optim.optimizer.kinds import MASTER
from vime_optim.optimizer.record import record_of
from vime_optim.optimizer.slots import Slot, slots_of
from vime_optim.reshard.coded import CodedShard
from vime_optim.reshard.keys import KeyInfo, digest_of
from vime_optim.reshard.layout import ParamLayout, param_layouts
from vime_optim.reshard.plan import Piece, RankPlan, check_local, pieces_of_range
from vime_optim.state_dicts import MadeDict, walk

PREFIX = "optimizer.state"


class ParamState(MadeDict):
    """The optimizer's tensors for one save or load, as Megatron takes them, and how they were made.

    Attributes:
        plan: what this rank writes or reads. The ranks compare its digest before anything is
            written.
        is_loading: it is a template that a load fills.
        dist_opt: the DistributedOptimizer.
        destinations: by (parameter number, state name). In a save they are what is read from.
    """

    plan: RankPlan
    is_loading: bool
    dist_opt: Any
    destinations: dict[tuple[int, str], Destination]

    def __deepcopy__(self, memo: dict[int, Any]) -> MadeDict:
        """What a template's tensors are is where they belong: a copy has the same."""
        if self.is_loading:
            held = [state for entry in self.values() for state in entry.values()]
            pieces = [piece for state in held if type(state) is dict for piece in state.values()]
            memo.update((id(piece.data), piece.data) for piece in pieces)
        return super().__deepcopy__(memo)

    @property
    def group(self) -> Any:
        """The data-parallel process group that shares this optimizer."""
        return self.dist_opt.data_parallel_group

    @property
    def digest(self) -> str:
        return digest_of(self.plan.keys)


def param_states(state: Any) -> Iterator[ParamState]:
    """Every ParamState in a state dict."""
    for _, value in walk(state, leaves=ParamState):
        if isinstance(value, ParamState):
            yield value


@dataclass
class Destination:
    """Where one state of one parameter shard is loaded to, or saved from.

    Attributes:
        slot: the state in the optimizer; None where this rank holds no part of it.
        flat: 1-D, what the pieces are views of: the slot's own tensor, or for a coded state on load
            the placeholder of `coded`. On save a coded state has none: each piece is decoded when
            it is written.
        pieces: what of the state is in the state dict, in the order of its numbers there.
    """

    layout: ParamLayout
    slot: Slot | None
    flat: torch.Tensor | None
    coded: CodedShard | None = None
    pieces: list[Piece] = field(default_factory=list)

    @property
    def is_gathered(self) -> bool:
        return self.layout.targets is None

    def view(self, piece: Piece) -> torch.Tensor:
        """A piece, as it is written or read into."""
        if self.flat is not None:
            return self.flat[piece.start_elem :][: piece.numel].view(piece.size)
        assert self.slot is not None  # a save has pieces of what this rank owns
        return LazyValue(self.slot, piece.start_elem, piece.size)


def state_names(dist_opt: Any) -> tuple[str, ...]:
    """Names of the states of this optimizer, known on every rank, also where it holds no shard."""
    return (MASTER, *getattr(dist_opt, "optimizer_state_keys", ("exp_avg", "exp_avg_sq")))


@torch.no_grad()
def build_param_state(dist_opt: Any, model_sharded_state_dict: Any, is_loading: bool) -> ParamState:
    """The `param_state` of fully_reshardable: {parameter number: {state: {n: ShardedTensor}}}.

    Raises:
        PlanError: two pieces hold the same elements, or one does not fit its tensor.
        OptimizerStateError: the optimizer has no state for an owned parameter.
    """
    state = ParamState()
    pieces: list[Piece] = []
    keys: list[KeyInfo] = []
    destinations: dict[tuple[int, str], Destination] = {}
    names = state_names(dist_opt)
    for layout in param_layouts(dist_opt, model_sharded_state_dict):
        keys += _keys(layout, names)
        slots = slots_of(dist_opt, layout.param) if layout.is_owned else {}
        if layout.targets is None:
            entry = _gathered_entry(dist_opt, layout, slots, names, is_loading, destinations)
        else:
            entry = {}
            for name, slot in slots.items():
                destination = _destination(layout, slot, _cut(layout, name), is_loading)
                pieces += destination.pieces
                entry[name] = _sharded_tensors(destination)
                destinations[layout.index, name] = destination
        if entry:
            state[layout.index] = entry
    state.plan = RankPlan(torch.distributed.get_rank(), tuple(pieces), tuple(keys))
    check_local(state.plan)
    state.is_loading = is_loading
    state.dist_opt, state.destinations = dist_opt, destinations
    if is_loading:
        expect_load(state)
    return state


def expect_load(state: ParamState) -> None:
    """Note in the optimizer that its next load_state_dict() takes its values from this template."""
    for destination in state.destinations.values():
        if destination.coded is not None:
            destination.coded.reads.clear()  # noted by an earlier load with the same template
    record = record_of(state.dist_opt)
    record.destinations, record.are_destinations_taken = state.destinations, False


def as_template(state: ParamState) -> ParamState:
    """A param state that was built for a save, made into a template for a load."""
    template = ParamState(state)
    template.dist_opt = state.dist_opt
    template.plan, template.is_loading = state.plan, True
    template.destinations = {}
    for (index, name), source in state.destinations.items():
        destination = source
        if not source.is_gathered and source.flat is None:
            assert source.slot is not None
            destination = _destination(source.layout, source.slot, source.pieces, is_loading=True)
            template[index] = {**template[index], name: _sharded_tensors(destination)}
        template.destinations[index, name] = destination
    expect_load(template)
    return template


def _keys(layout: ParamLayout, names: tuple[str, ...]) -> list[KeyInfo]:
    shapes = {(run.key, run.global_shape) for run in layout.targets or ()}
    return [KeyInfo(_key(name, key), shape) for key, shape in sorted(shapes) for name in names]


def _key(state: str, key: str) -> str:
    return f"{PREFIX}.{state}.{key}"


def _cut(layout: ParamLayout, state: str) -> list[Piece]:
    start, end, name = layout.start, layout.end, layout.name
    return [
        piece
        for run in layout.targets or ()
        for piece in pieces_of_range(run, start, end, name, state, _key(state, run.key))
    ]


def _destination(
    layout: ParamLayout, slot: Slot, pieces: list[Piece], is_loading: bool
) -> Destination:
    direct = slot.direct()
    if direct is not None:
        return Destination(layout, slot, direct.view(-1), None, pieces)
    coded = CodedShard(slot.numel, _may_be_partial(layout)) if is_loading else None
    flat = None if coded is None else coded.placeholder
    return Destination(layout, slot, flat, coded, pieces)


def _may_be_partial(layout: ParamLayout) -> bool:
    """Whether Megatron lets the checkpoint lack elements of it (a padded vocabulary)."""
    return bool(getattr(layout.base, "allow_shape_mismatch", False))


def _sharded_tensors(destination: Destination) -> dict[int, Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    made = {}
    for number, piece in enumerate(destination.pieces):
        view = destination.view(piece)
        made[number] = ShardedTensor(
            key=piece.key,
            data=view,
            dtype=view.dtype,
            # Prepended axes are folded into the shape: Megatron's chunk offsets count them.
            local_shape=piece.size,
            global_shape=piece.global_shape,
            global_offset=piece.offset,
            axis_fragmentations=None,
            replica_id=piece.replica_id,
            allow_shape_mismatch=_may_be_partial(destination.layout),
        )
    return made


def _gathered_entry(
    dist_opt: Any,
    layout: ParamLayout,
    slots: Mapping[str, Slot],
    names: tuple[str, ...],
    is_loading: bool,
    destinations: dict[tuple[int, str], Destination],
) -> dict[str, Any]:
    """A parameter whose parts are not contiguous runs: whole on every rank, as Megatron does it."""
    if not is_loading:
        counters["parameters gathered whole, as their layout cannot be cut"] += 1
    entry = {}
    for name in names:
        slot = slots.get(name)
        if is_loading:
            flat = torch.empty(layout.numel, dtype=torch.float32, device="cpu")
        else:
            flat = _gather(dist_opt, layout, slot)
        destinations[layout.index, name] = Destination(layout, slot, flat)
        changes: dict[str, Any] = {
            "key": _key(name, layout.base.key),
            "data": flat.view(layout.param.shape),
        }
        if not hasattr(layout.base, "build_fn"):
            changes["dtype"] = torch.float32
        entry[name] = replace(layout.base, **changes)
    return entry


def _gather(dist_opt: Any, layout: ParamLayout, slot: Slot | None) -> torch.Tensor:
    """The whole flat parameter (float32, host) from the ranges of all data-parallel ranks.

    Summed as integers: each element is non-zero on one rank alone, so its bits stay as they are.
    """
    device = collectives.device_of(dist_opt.data_parallel_group)
    bits = torch.zeros(layout.numel, dtype=torch.int32, device=device)
    if slot is not None:
        bits[layout.start : layout.end] = slot.read().view(torch.int32).to(bits.device)
    torch.distributed.all_reduce(bits, group=dist_opt.data_parallel_group)
    return bits.view(torch.float32).cpu()

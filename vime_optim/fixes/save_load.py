"""What happens in a save and in a load, from top to bottom.

Several fixes have a step in the same functions of Megatron. Each of these functions is wrapped
once, here, and its steps stand in the order in which they are taken. A step is written in the
module of its fix. It is taken if `on` holds the fix: those that are in force, with their hit
counters.

A save: the optimizer gives its state (`sharded_state_dict`, which calls `state_dict`), all that is
to be saved goes to `dist_checkpointing.save`, and that plans, writes and finalizes. A load: the
optimizer gives a template, `dist_checkpointing.load` fills it, the optimizer takes it
(`load_state_dict`).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from vime_optim.fixes import (
    chained,
    foreign,
    formats,
    gather_free,
    half_loaded,
    inert_state,
    sharding,
    step,
    stub,
    writer_async,
    writer_commit,
)
from vime_optim.optimizer.kinds import has_buffers
from vime_optim.probe import bind
from vime_optim.registry import On


def tell_save(original: Any, on: On) -> Any:
    """The wrapper of dist_checkpointing.save."""

    def save(*args: Any, **kwargs: Any) -> Any:
        call = bind(original, *args, **kwargs)
        commits = "writer-commit" in on and not writer_commit.is_remote(call)
        with writer_commit.one_save(call) if commits else nullcontext():
            if "formats" in on:
                formats.settle_format(call, on["formats"])
            if "chained" in on:
                chained.agree_on_the_step(call, on["chained"])
            if "gather-free" in on:
                gather_free.compare_plans(call)
            if not commits:
                return original(**call)
            with writer_commit.session(call, on["writer-commit"]) as session:
                request = original(**call)
                writer_commit.commit(session, request)
        return request

    return save


def tell_load(original: Any, on: On) -> Any:
    """The wrapper of dist_checkpointing.load."""

    def load(*args: Any, **kwargs: Any) -> Any:
        call = bind(original, *args, **kwargs)
        commits = "writer-commit" in on and not writer_commit.is_remote(call)
        operation = writer_commit.operation_of_load(call) if commits else None
        if "writer-async" in on:
            writer_async.hold_saves()
        hit = on["writer-commit"] if commits else None
        with (
            half_loaded.until_taken(call, operation) if "half-loaded" in on else nullcontext(),
            writer_commit.one_load(call, operation) if commits else nullcontext(),
            writer_commit.whole_or_refused(call, operation, hit) if hit else nullcontext(),
        ):
            if "gather-free" in on:
                gather_free.make_templates(call)
            if "sharding" in on:
                sharding.take_the_saved_type(call, on["sharding"])
            with sharding.keeping_the_template(call) if "sharding" in on else nullcontext():
                return original(**call)

    return load


def tell_state_dict(original: Any, on: On) -> Any:
    """The wrapper of DistributedOptimizer.state_dict: param groups, without the tensors."""

    def state_dict(self: Any) -> Any:
        if "stub" in on and stub.holds_nothing(self, on["stub"]):
            return stub.empty_state()
        if not has_buffers(self):
            return original(self)
        if "step" not in on:
            return original(self)
        if "inert-state" in on:
            inert_state.make_state(self, on["inert-state"])
        state = step.state_with_steps(original, self, on["step"])
        if "foreign" in on and "gather-free" in on:
            # The mark says that each state is under its own name. These three fixes see to it.
            foreign.mark(state)
        return state

    return state_dict

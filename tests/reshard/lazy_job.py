"""A save that tells what became of its coded states."""

from __future__ import annotations

from typing import Any

from vime_optim.verify import job


def save(payload: dict[str, Any]) -> dict[str, Any]:
    """Save; also how many lazy values were made, and how often one was decoded as a whole."""
    from vime_optim.files.lazy import LazyValue
    from vime_optim.simulate.device import LEDGER

    seen = {"made": 0, "decoded": 0, "blocks": 0, "build_bytes": -1}
    decode, blocks = LazyValue.decode, LazyValue.blocks

    def counted(self: LazyValue) -> Any:
        seen["decoded"] += 1
        return decode(self)

    def counted_blocks(self: LazyValue, limit_numel: int) -> Any:
        for block in blocks(self, limit_numel):
            seen["blocks"] += 1
            yield block

    LazyValue.decode = counted
    LazyValue.blocks = counted_blocks
    _measure_build(seen, LEDGER)
    answer = job.save(payload)
    return {**answer, **seen}


def _measure_build(seen: dict[str, int], ledger: Any) -> None:
    """Device memory that is allocated while param state is built, in bytes."""
    from vime_optim.reshard import engine

    build, view = engine.build_param_state, engine.Destination.view

    def measured(*args: Any, **kwargs: Any) -> Any:
        before = ledger.current_bytes
        ledger.reset_peak()
        state = build(*args, **kwargs)
        seen["build_bytes"] = ledger.peak_bytes - before
        return state

    def counted_view(*args: Any) -> Any:
        seen["made"] += 1
        return view(*args)

    engine.build_param_state = measured
    engine.Destination.view = counted_view

"""Phases of a verify job in which some parameters are taken for ones that cannot be cut."""

from __future__ import annotations

from typing import Any

from vime_optim.reshard import layout
from vime_optim.verify import job


def _refuse_factories() -> None:
    cut = layout._targets

    def refuse(base: Any, param: Any, instance: int) -> Any:
        return (
            None
            if hasattr(base, "build_fn") or "linear_proj" in base.key
            else cut(base, param, instance)
        )

    layout._targets = refuse


def save(payload: dict[str, Any]) -> dict[str, Any]:
    _refuse_factories()
    answer = job.save(payload)
    import vime_optim

    return {**answer, "counters": vime_optim.status().counters}


def resume(payload: dict[str, Any]) -> dict[str, Any]:
    _refuse_factories()
    return job.resume(payload)

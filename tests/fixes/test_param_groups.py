"""Param groups of optimizers that are not distributed keep all that tells them apart (F24)."""

from __future__ import annotations

import json

import pytest

from tests.install.test_install import run_script
from tests.optimizer.test_matching import group
from vime_optim.tools.megatron_source import RELEASES, fetch


@pytest.mark.parametrize(
    "release",
    [r if r == "0.16.1" else pytest.param(r, marks=pytest.mark.matrix) for r in RELEASES],
)
def test_optimizers_that_are_not_distributed(release: str) -> None:
    answer = json.loads(
        run_script(
            fetch(release),
            f"""
            load_megatron()
            import json, vime_optim
            from megatron.core.optimizer.optimizer import MegatronOptimizer

            def maxima():
                current = {[group(), group(max_lr=0.005)]!r}
                stored = [dict(g, params=[i]) for i, g in enumerate(current[::-1])]
                found = MegatronOptimizer._filter_and_reorder_param_groups(current, stored)
                return [[g["max_lr"], g["params"]] for g in found]

            stock = maxima()
            vime_optim.install()
            print(json.dumps([stock, maxima()]))
            """,
        )
    )
    stock, ours = answer
    assert ours == [[0.02, [0]], [0.005, [1]]]
    assert (stock == ours) == release.startswith("0.19")

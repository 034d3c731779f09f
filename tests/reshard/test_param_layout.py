"""Which flat ranges a parameter is in the checkpoint, on the real megatron-core's own classes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cases import Case
from tests.install.test_install import run_script
from tests.phases import Phases
from vime_optim.tools.megatron_source import fetch


@pytest.mark.parametrize("release", [pytest.param("0.15.3", marks=pytest.mark.matrix), "0.19.2"])
def test_factories_are_probed_without_memory(release: str) -> None:
    answer = json.loads(
        run_script(
            fetch(release),
            """
            load_megatron()
            import torch
            from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
            from vime_optim.reshard.layout import _targets

            def tensor(key, data, replica):
                return ShardedTensor.from_rank_offsets(key, data, replica_id=replica)

            def halves(dim):
                def build(key, t, replica, flattened_range=None):
                    return {str(i): tensor(f"{key}.{i}", part, replica)
                            for i, part in enumerate(torch.chunk(t, 2, dim))}
                return build

            def turned(key, t, replica, flattened_range=None):
                return [tensor(key, t.t().contiguous(), replica)]

            def looks(key, t, replica, flattened_range=None):
                return [tensor(key, t, replica)] if t.sum().item() else []

            def merge(parts):
                return parts

            param = torch.zeros(6, 4)
            answers = {}
            for name, build in (("rows", halves(0)), ("columns", halves(1)), ("turned", turned),
                                ("looks", looks)):
                factory = ShardedTensorFactory("w", param, build, merge, replica_id=(0, 0, 3))
                found = _targets(factory, param, 1)
                answers[name] = found and [[t.key, t.flat_start, t.local_shape, t.replica_id]
                                           for t in found]
            stacked = ShardedTensor.from_rank_offsets(
                "s", param, (0, 1, 3), replica_id=(0, 1, 2), prepend_axis_num=1)
            (found,) = _targets(stacked, param, 0)
            answers["stacked"] = [found.global_shape, found.global_offset, found.local_shape,
                                  found.replica_id]
            try:
                odd = ShardedTensor.from_rank_offsets("o", param[:5], replica_id=(0, 0, 0))
                _targets(odd, param, 0)
            except Exception as error:
                answers["of another size"] = str(error)
            print(json.dumps(answers))
            """,
        )
    )
    assert "another size" in answer["of another size"]
    assert "(5, 4)" in answer["of another size"]
    assert answer["rows"] == [["w.0", 0, [3, 4], [0, 0, 1]], ["w.1", 12, [3, 4], [0, 0, 1]]]
    assert answer["columns"] is None
    assert answer["turned"] is None
    assert answer["looks"] is None
    assert answer["stacked"] == [[3, 6, 4], [1, 0, 0], [6, 4], [0, 1, 0]]


def test_a_parameter_that_cannot_be_cut_is_gathered_alone(phases: Phases) -> None:
    case = Case.parse("0.16.1,hybrid,pao,f=0.5,dp=3,fully_reshardable")
    for answer in save_and_resume("tests.reshard.gather_job", case, phases):
        assert sum(answer["counters"].values()) > 0


@pytest.mark.parametrize("release", [pytest.param("0.16.1", marks=pytest.mark.matrix), "0.19.2"])
def test_megatrons_fully_parallel_wrappers_change_nothing(release: str, phases: Phases) -> None:
    case = Case.parse(f"{release},hybrid,pao,f=0.5,dp=3,fully_reshardable")
    save_and_resume("tests.reshard.parallel_job", case, phases)


def save_and_resume(module: str, case: Case, phases: Phases) -> list[dict[str, Any]]:
    """Run both phases of `module`, compare every bit, and give what the save returned."""
    saved = phases.run(f"{module}:save", case)
    phases.run(f"{module}:resume", case)
    assert phases.differences(f"saved_{case.num_steps}", "loaded", skip={"grad"}) == []
    assert phases.differences("after_save", "resumed") == []
    return saved

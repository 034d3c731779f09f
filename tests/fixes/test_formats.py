"""A save takes a format that can hold it; a load takes what callers give it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.writer.launch import launch, results, tree_of
from vime_optim.fixes import formats, sharding

_OTHERS = ("0.15.3", "0.16.1", "0.17.1", "0.18.2")
_VERSIONS = [
    "0.19.2",
    *(pytest.param(version, marks=pytest.mark.matrix) for version in _OTHERS),
]


@pytest.fixture(scope="module", params=_VERSIONS)
def found(request: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("formats")
    return run(tree_of(request.param), root)


def run(tree: Path, root: Path) -> dict[str, Any]:
    """Outcome of each scenario, by name, rank by rank."""
    environment = {"VIME_OPTIM_TEST_ALL": "1"}
    arguments = {"root": str(root)}
    ranks = results(launch(tree, "formats", arguments=arguments, environment=environment))
    return dict(ranks[0])


@pytest.mark.parametrize("name", ["default", "fully", "last", "pipeline", "pipeline-named"])
def test_frozen_layers_are_saved_in_the_format_that_can_hold_them(found: Any, name: str) -> None:
    for outcome in found["frozen"][name]:
        assert outcome["type"] == outcome["second"] == "dp_reshardable"
        assert outcome["resumed"]
        assert outcome["went on"]
    assert len(found["frozen"][name][0]["warned"]) == 1
    assert "layers.weight" in found["frozen"][name][0]["warned"][0]


def test_what_the_format_can_hold_stays_in_it(found: Any) -> None:
    for outcome in found["frozen"]["whole"]:
        assert outcome["type"] == outcome["second"] == "fully_reshardable"
        assert outcome["warned"] == []
        assert outcome["resumed"]
        assert outcome["went on"]


def test_the_policy_is_kept(found: Any) -> None:
    for outcome in found["frozen"]["refused"]:
        assert "OptimizerStateError" in outcome["text"] or "WriterError" in outcome["text"]
        assert "layers.weight" in outcome["text"] or "share a tensor" in outcome["text"]
        assert not [name for name in outcome["files"] if name.endswith((".distcp", ".json"))]


@pytest.mark.parametrize("offload", ["True", "False"])
def test_templates_of_every_sort_load(found: Any, offload: str) -> None:
    for outcome in found["templates"][offload]:
        assert [name for name, right in outcome.items() if not right] == []


@pytest.mark.parametrize("offload", ["True", "False"])
def test_absent_keys_are_the_planners_decision(found: Any, offload: str) -> None:
    assert sum(outcome["states"] for outcome in found["partial"][offload]) > 1
    for outcome in found["partial"][offload]:
        assert outcome["not allowed"]
        assert outcome["kept"]
        assert "only in part" in outcome["in part"]


class Agreed:
    """An operation of one rank."""

    def check(self, values: tuple[int, ...] = ()) -> tuple[int, ...]:
        return values


@pytest.mark.parametrize("content", [None, {}, {"mine": 1}])
def test_a_plain_state_gets_no_key_beside_its_own(content: Any) -> None:
    """megatron-core takes each key of a plain chain's common state for a member."""
    state = {"optimizer": {sharding.RECORD_KEY: sharding.DP}}
    call = {"sharded_state_dict": state, "content_metadata": content}
    formats._settle(call, Agreed())  # type: ignore[arg-type]
    if content is None:
        assert call["content_metadata"] is None
    else:
        assert call["content_metadata"] == {**content, sharding.TYPE_KEY: sharding.DP}

"""The list of the fixes: each is a module of its name, and what they declare holds."""

from __future__ import annotations

import importlib
import pkgutil
from collections import defaultdict
from itertools import combinations
from pathlib import Path

import pytest

from tests.conftest import LauncherPool
from vime_optim import fixes as package
from vime_optim.fixes import FIXES
from vime_optim.installation import Installation
from vime_optim.registry import Fix, Target

BY_ID = {fix.id: fix for fix in FIXES}
TESTS = Path(__file__).parents[1] / "fixes"
HELPERS = {"places", "save_load"}


def module_of(fix: Fix) -> str:
    return fix.id.replace("-", "_")


def below(id: str) -> set[str]:
    """What a fix says that it comes after, and what those say."""
    return {id for other in BY_ID[id].after for id in (other, *below(other))}


def test_a_fix_is_a_module_of_its_name_and_has_tests() -> None:
    assert len(BY_ID) == len(FIXES)
    for fix in FIXES:
        assert importlib.import_module(f"vime_optim.fixes.{module_of(fix)}").FIX is fix
        assert (TESTS / f"test_{module_of(fix)}.py").is_file(), fix.id
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert modules - HELPERS == {module_of(fix) for fix in FIXES}


def test_every_head_says_what_and_when() -> None:
    for fix in FIXES:
        head = importlib.import_module(f"vime_optim.fixes.{module_of(fix)}").__doc__
        words = ["Symptom:", "Cause:", "Changes:", "Leaves alone:", "Remove when:"]
        at = [head.find(f"\n{word} ") for word in words]
        assert at == sorted(at), fix.id
        assert at[0] > 0, fix.id


def test_what_is_required_and_comes_before_is_there_and_no_circle() -> None:
    for fix in FIXES:
        assert set(fix.requires) | set(fix.after) <= BY_ID.keys() - {fix.id}
        assert fix.id not in below(fix.id)


def test_what_is_skipped_takes_along_what_requires_it() -> None:
    for skipped in FIXES:
        installation = Installation(FIXES, (skipped.id,), strict=False)
        off = {fix.id for fix in FIXES if installation._why_off((fix.id, ""), {})}
        assert off == {fix.id for fix in FIXES if skipped.id in fix.requires}
    assert "writer-async" in BY_ID["writer-files"].requires, "its threads write the files"


def test_layers_of_one_attribute_have_a_declared_order() -> None:
    layers: dict[str, list[tuple[Fix, Target]]] = defaultdict(list)
    for fix in FIXES:
        for target in fix.targets:
            layers[str(target)].append((fix, target))
    several = {place: found for place, found in layers.items() if len(found) > 1}
    assert len(several) > 10
    for place, found in several.items():
        told = {target.wrap for _, target in found if isinstance(target.wrap, str)}
        if told:
            assert {target.wrap for _, target in found} == told, place
            assert len(told) == 1, place
            assert callable(pkgutil.resolve_name(told.pop()))
            continue
        for (one, _), (other, _) in combinations(found, 2):
            assert (one.id in below(other.id)) != (other.id in below(one.id)), (place, one.id)


@pytest.mark.parametrize("release", ["0.15.3", "0.19.2"])
def test_replacements_take_arguments_by_the_names_of_the_original(
    release: str, launchers: LauncherPool, tmp_path: Path
) -> None:
    (answer,) = launchers.get(release).run(
        "tests.install.names_job:compared", world_size=1, payload={}, out=tmp_path / "out"
    )
    assert answer["differ"] == []
    assert len(answer["compared"]) > 60

"""A name means one thing: no two modules of one name, no public class defined twice."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "vime_optim"

MODULES = {
    "__init__": "Python's own",
    "job": "async_save's is the job of one save; verify's the training job of one case",
}
CLASSES: dict[str, str] = {}
"""What may stand for two things, and why."""


def paths() -> list[Path]:
    found = sorted(PACKAGE.rglob("*.py"))
    assert len(found) > 100
    return found


def twice(places: dict[str, list[str]], allowed: dict[str, str]) -> dict[str, list[str]]:
    several = {name: where for name, where in places.items() if len(where) > 1}
    assert allowed.keys() <= several.keys(), "an exception is not needed any more"
    return {name: where for name, where in several.items() if name not in allowed}


def test_modules_of_the_package_have_names_of_their_own() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in paths():
        places[path.stem].append(str(path.relative_to(PACKAGE)))
    assert not twice(places, MODULES)


def test_public_classes_of_the_package_have_names_of_their_own() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in paths():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    assert not twice(places, CLASSES)

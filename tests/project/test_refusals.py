"""docs/refusals.md lists every message by which code that install() runs refuses something."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from vime_optim import errors

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "vime_optim"
PAGE = ROOT / "docs" / "refusals.md"
#: What runs under install(); tools, verify and the simulation refuse for themselves.
PLACES = (
    *("fixes", "async_save", "planning", "commit", "reshard", "optimizer", "files"),
    *("installer.py", "installation.py", "registry.py", "settings.py", "compat.py"),
)
#: check_optimizer() is there to find fault; nothing else calls it.
ASKED_FOR = "soundness.py"
ERRORS = {
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.VimeOptimError)
}
#: Functions that make an error of the text they are given.
MAKERS = {"_refusal"}


def sources() -> Iterator[Path]:
    for place in PLACES:
        path = PACKAGE / place
        found = [path] if path.is_file() else sorted(path.rglob("*.py"))
        assert found, f"{place} is gone: say in PLACES what install() runs now"
        yield from (file for file in found if file.name != ASKED_FOR)


def messages(file: Path) -> Iterator[str]:
    """The first argument of every error; {} for what a message fills in."""
    tree = ast.parse(file.read_text())
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        name = getattr(getattr(node, "func", None), "id", None)
        if isinstance(node, ast.Call) and node.args and name in ERRORS | MAKERS:
            yield from texts(node.args[0], constants)


def texts(value: ast.expr, constants: dict[str, ast.expr]) -> Iterator[str]:
    if isinstance(value, ast.IfExp):
        yield from texts(value.body, constants)
        yield from texts(value.orelse, constants)
    elif isinstance(value, ast.Constant):
        yield str(value.value)
    elif isinstance(value, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in value.values)
        yield "".join(map(str, parts))
    elif isinstance(value, ast.Name) and value.id in constants:
        yield from texts(constants[value.id], constants)
    # Else the text is an argument: whoever gives it is found by its own call.


def in_code() -> dict[str, str]:
    return {text: file.name for file in sources() for text in messages(file)}


def on_page() -> set[str]:
    return set(re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(), re.M))


def test_every_refusal_is_on_the_page() -> None:
    missing = {text: file for text, file in in_code().items() if text not in on_page()}
    assert missing == {}, "say in docs/refusals.md what wrong result these prevent"


def test_the_page_lists_nothing_else() -> None:
    assert on_page() - set(in_code()) == set()


@pytest.mark.parametrize("heading", ["What stock accepts", "What fails on stock too"])
def test_every_row_says_why(heading: str) -> None:
    section = PAGE.read_text().partition(f"## {heading}")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `[^`]+` \|(.+)\|$", section, re.M)
    assert rows
    for row in rows:
        assert all(len(cell.strip()) > 10 for cell in row.split(" | ")), row

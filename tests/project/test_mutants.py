"""The changes of `make mutants` fit the tree: each text is there once, each test exists."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.changes import ROOT, Change, ChangeError, read_changes

CHANGES = read_changes()


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: f"{Path(c.file).stem}: {c.name}")
def test_a_change_can_be_made_and_its_test_is_there(change: Change) -> None:
    before = (ROOT / change.file).read_text()
    after = change.applied_to(before)
    assert after != before
    compile(after, change.file, "exec")
    for test in change.tests:
        path, _, name = test.partition("::")
        text = (ROOT / path).read_text()
        function = name.rpartition("::")[2].partition("[")[0]
        assert re.search(rf"^ *def {re.escape(function)}\b", text, re.M) or not name, test


def test_the_list_is_long_enough_and_says_each_change_once() -> None:
    assert len(CHANGES) >= 56
    folders = Counter(change.file.split("/")[1] for change in CHANGES)
    assert folders["fixes"] >= 10
    assert folders["reshard"] >= 10
    names = Counter((change.file, change.name) for change in CHANGES)
    assert max(names.values()) == 1
    made = Counter((change.file, change.old, change.new) for change in CHANGES)
    assert max(made.values()) == 1


def change(old: str, new: str) -> Change:
    return Change("a change", "vime_optim/x.py", old, new, ("tests/test_x.py",))


def test_a_text_that_is_gone_or_there_twice_is_an_error() -> None:
    assert change("b", "x").applied_to("abc") == "axc"
    for text in ("a c", "a b b"):
        with pytest.raises(ChangeError, match=r"its text is [02] times in vime_optim/x.py"):
            change("b", "x").applied_to(text)


def test_a_text_of_several_lines_is_found_at_any_depth() -> None:
    text = "def f():\n    if a:\n        b()\n    c()\n"
    made = change("if a:\n    b()\nc()", "c()").applied_to(text)
    assert made == "def f():\n    c()\n"
    with pytest.raises(ChangeError, match="0 times"):
        change("if a:\nb()", "c()").applied_to(text)


def test_a_change_is_undone(tmp_path: Path) -> None:
    path = tmp_path / "vime_optim" / "x.py"
    path.parent.mkdir()
    path.write_text("abc")
    seen = []

    def fail_inside() -> None:
        with change("b", "x").made_in(tmp_path):
            seen.append(path.read_text())
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_inside()
    assert seen == ["axc"]
    assert path.read_text() == "abc"

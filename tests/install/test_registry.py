"""Patches are undone exactly: own and inherited attributes, static and class methods, functions.

On toy modules: what the owner's __dict__ holds before and after, object for object.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vime_optim.errors import ConflictError, NotUnderstoodError
from vime_optim.installation import Installation
from vime_optim.registry import Fix, Hit, Target, Verdict, not_understood, takes

SOURCE = """
class Base:
    def inherited(self):
        return "inherited"

    @classmethod
    def made(cls):
        return cls.__name__

class Derived(Base):
    def own(self):
        return "own"

    @staticmethod
    def static(value):
        return value

def function():
    return "function"
"""
TARGETS = ("Derived.inherited", "Derived.made", "Derived.own", "Derived.static", "function")


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module `toy_target`, and `toy_user`, which imported a function of it by name."""
    (tmp_path / "toy_target.py").write_text(SOURCE)
    (tmp_path / "toy_user.py").write_text("from toy_target import function\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("toy_target", "toy_user"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("toy_target")
    importlib.import_module("toy_user")
    return module


def counting(original: Any, hit: Hit) -> Any:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        hit()
        return f"ours: {original(*args, **kwargs)}"

    return wrapped


def fix(*names: str, id: str = "toy", **options: Any) -> Fix:
    targets = tuple(Target("toy_target", name, counting, **options) for name in names)
    return Fix(id, ("F0",), "a toy", targets)


def holdings(module: ModuleType) -> dict[str, dict[str, Any]]:
    """The __dict__ of every owner, as it is."""
    user = sys.modules["toy_user"]
    owners = {"module": module, "Base": module.Base, "Derived": module.Derived, "user": user}
    return {name: dict(vars(owner)) for name, owner in owners.items()}


def same(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> bool:
    """The same keys, and the very same objects."""
    return all(
        before[owner].keys() == after[owner].keys()
        and all(before[owner][key] is after[owner][key] for key in before[owner])
        for owner in before
    )


def call_all(module: ModuleType) -> list[str]:
    derived = module.Derived
    one = derived()
    user = sys.modules["toy_user"]
    calls = (one.inherited(), derived.made(), one.own(), derived.static("x"), module.function())
    return [*calls, user.function()]


PLAIN = ["inherited", "Derived", "own", "x", "function", "function"]


@pytest.mark.parametrize("name", TARGETS)
def test_undo_leaves_every_owner_as_it_was(name: str, toy: ModuleType) -> None:
    before = holdings(toy)
    installation = Installation([fix(name)], (), strict=True)
    installation.apply()
    assert not same(before, holdings(toy))
    assert installation.states[0].diagnosis.verdict is Verdict.NEEDED
    assert sum(text.startswith("ours: ") for text in call_all(toy)) == 1 + (name == "function")
    assert installation.hits["toy"] == 1 + (name == "function")
    installation.remove()
    assert same(before, holdings(toy))
    assert call_all(toy) == PLAIN


def test_two_fixes_of_one_attribute_are_undone_in_the_other_order(toy: ModuleType) -> None:
    before = holdings(toy)
    both = [fix(*TARGETS, id="first"), fix(*TARGETS, id="second")]
    installation = Installation(both, (), strict=True)
    installation.apply()
    assert call_all(toy) == [f"ours: ours: {text}" for text in PLAIN]
    installation.remove()
    assert same(before, holdings(toy))


def test_an_inherited_method_that_changes_later_is_not_frozen(toy: ModuleType) -> None:
    """Undo deletes what was not there: a copy of the base's method would hide the base's next."""
    installation = Installation([fix("Derived.inherited")], (), strict=True)
    installation.apply()
    installation.remove()
    toy.Base.inherited = lambda self: "newer"
    assert toy.Derived().inherited() == "newer"


def test_a_function_imported_by_name_after_install_is_given_back(toy: ModuleType) -> None:
    installation = Installation([fix("function")], (), strict=True)
    installation.apply()
    late = ModuleType("toy_late")
    late.function = toy.function  # type: ignore[attr-defined]
    sys.modules["toy_late"] = late
    try:
        installation.remove()
        assert late.function is toy.function
        assert toy.function() == "function"
    finally:
        del sys.modules["toy_late"]


def test_a_wrap_that_fails_leaves_nothing_behind(toy: ModuleType) -> None:
    def broken(original: Any, hit: Hit) -> Any:
        raise ValueError("no")

    before = holdings(toy)
    bad = Fix("bad", (), "fails", (Target("toy_target", "Derived.own", broken),))
    installation = Installation([fix(*TARGETS), bad], (), strict=True)
    with pytest.raises(ValueError, match="no"):
        installation.apply()
    assert same(before, holdings(toy))


def test_nothing_is_changed_where_one_target_is_not_understood(toy: ModuleType) -> None:
    before = holdings(toy)
    strange = fix("Derived.own", id="strange", diagnose=lambda *_: not_understood("it is odd"))
    with pytest.raises(NotUnderstoodError, match="it is odd"):
        Installation([fix("function"), strange], (), strict=True).apply()
    assert same(before, holdings(toy))
    lenient = Installation([fix("function"), strange], (), strict=False)
    lenient.apply()
    assert [text.startswith("ours: ") for text in call_all(toy)] == [False] * 4 + [True] * 2
    lenient.remove()
    assert same(before, holdings(toy))


@pytest.mark.parametrize("patched_over", [False, True])
def test_a_fix_that_goes_off_late_leaves_the_others_in_force(
    toy: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patched_over: bool
) -> None:
    """Its second module is imported later and not understood: what was patched is given back."""
    monkeypatch.delitem(sys.modules, "toy_user")
    before = {name: dict(vars(owner)) for name, owner in (("D", toy.Derived), ("B", toy.Base))}
    odd = Target("toy_user", "function", counting, lambda *_: not_understood("it is odd"))
    half = Fix("half", ("F0",), "a toy", (*fix(*TARGETS).targets, odd))
    both = [fix("Derived.own", id="below"), half, fix("Derived.own", id="above")]
    installation = Installation(both, (), strict=False)
    installation.apply()
    assert toy.Derived().own() == "ours: ours: ours: own"
    if patched_over:
        monkeypatch.setattr(toy.Derived, "made", classmethod(lambda cls: "theirs"))
        with pytest.raises(NotUnderstoodError, match=r"Derived\.made"):
            importlib.import_module("toy_user")
        return
    importlib.import_module("toy_user")
    assert [text.startswith("ours: ") for text in call_all(toy)] == [
        False,
        False,
        True,
        *[False] * 3,
    ]
    assert toy.Derived().own() == "ours: ours: own"
    verdicts = [s.diagnosis.verdict for s in installation.states if s.fix is half]
    assert verdicts == [Verdict.WITHHELD] * len(TARGETS) + [Verdict.NOT_UNDERSTOOD]
    installation.remove()
    assert before == {name: dict(vars(o)) for name, o in (("D", toy.Derived), ("B", toy.Base))}


def test_undo_refuses_to_go_below_a_later_patch(toy: ModuleType) -> None:
    installation = Installation([fix(*TARGETS)], (), strict=True)
    installation.apply()
    ours = toy.Derived.own
    toy.Derived.own = lambda self: "theirs"
    held = holdings(toy)
    with pytest.raises(ConflictError, match="patched over"):
        installation.remove()
    assert same(held, holdings(toy)), "half of it was undone"
    toy.Derived.own = ours
    installation.remove()
    assert call_all(toy) == PLAIN


def test_takes_looks_for_the_parameters(toy: ModuleType) -> None:
    def method(self: Any, model: Any, *rest: Any) -> None: ...

    assert takes("self", "model")(toy, method).verdict is Verdict.NEEDED
    assert takes("self", "other")(toy, method).verdict is Verdict.NOT_UNDERSTOOD

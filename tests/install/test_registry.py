"""Patches are undone exactly: own and inherited attributes, static and class methods, functions.

On toy modules: what the owner's __dict__ holds before and after, object for object.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from functools import partial
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


def tell_toy(original: Any, on: Any) -> Any:
    def told(*args: Any, **kwargs: Any) -> Any:
        for hit in on.values():
            hit()
        return f"{' '.join(on)}: {original(*args, **kwargs)}"

    return told


def step_of(id: str, **options: Any) -> Fix:
    story = f"{__name__}:tell_toy"
    return Fix(id, ("F0",), "a toy", (Target("toy_target", "Derived.own", story, **options),))


@pytest.mark.parametrize("late", [False, True])
def test_one_wrapper_tells_the_steps_of_several_fixes(
    toy: ModuleType, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Those in force alone, each with its own hits, also when one of them goes off later."""
    monkeypatch.delitem(sys.modules, "toy_user")
    own = vars(toy.Derived)["own"]
    odd = Target("toy_user", "function", counting, lambda *_: not_understood("it is odd"))
    going = replace(step_of("b"), targets=(*step_of("b").targets, *([odd] if late else [])))
    fixes = [step_of("a"), going, step_of("c"), step_of("d")]
    installation = Installation(fixes, ("c",), strict=False)
    installation.apply()
    assert toy.Derived().own() == "a b d: own"
    importlib.import_module("toy_user")
    after = "a d: own" if late else "a b d: own"
    assert toy.Derived().own() == after
    assert installation.hits == {"a": 2, "b": 1 if late else 2, "c": 0, "d": 2}
    applied = [state.fix.id for state in installation.states if state.patches]
    assert applied == after.removesuffix(": own").split()
    installation.remove()
    assert vars(toy.Derived)["own"] is own


def test_a_fix_is_off_with_one_that_it_requires(toy: ModuleType) -> None:
    odd = fix("function", id="odd", diagnose=lambda *_: not_understood("it is odd"))
    needs = {"a": "skipped", "b": "a", "c": "odd", "d": "there"}
    fixes = [replace(step_of(id), requires=(other,)) for id, other in needs.items()]
    fixes += [fix("Derived.made", id="skipped"), odd, fix("Derived.inherited", id="there")]
    installation = Installation(fixes, ("skipped",), strict=False)
    installation.apply()
    assert toy.Derived().own() == "d: own"
    why = {state.fix.id: state.diagnosis.reason for state in installation.states}
    assert "'skipped', which is skipped" in why["a"]
    assert "'a', which is off" in why["b"]
    assert "'odd', which is off" in why["c"]
    assert [state.diagnosis.verdict for state in installation.states][:3] == [Verdict.WITHHELD] * 3
    installation.remove()


def test_a_package_that_a_job_may_do_without_stands_or_falls_by_itself(
    toy: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An nvidia-resiliency-ext that is not understood turns nothing off in Megatron."""
    (tmp_path / "nvidia_resiliency_ext.py").write_text(SOURCE)
    extension = importlib.import_module("nvidia_resiliency_ext")
    odd = Target(
        "nvidia_resiliency_ext", "function", counting, lambda *_: not_understood("it is odd")
    )
    more = Target("nvidia_resiliency_ext", "Derived.own", counting)
    below = Fix("below", ("F0",), "a toy", (*fix("Derived.own").targets, odd))
    above = Fix("above", ("F0",), "a toy", (*fix("function").targets, more), requires=("below",))
    installation = Installation([below, above], (), strict=False)
    installation.apply()
    assert toy.Derived().own() == "ours: own"
    assert toy.function() == "ours: function"
    assert extension.Derived().own() == "own", "it needs the other's, which is off there"
    with pytest.raises(NotUnderstoodError, match="it is odd"):
        Installation([below], (), strict=True).apply()
    installation.remove()
    broken = Fix("below", ("F0",), "a toy", (*fix("Derived.own").targets, more, odd))
    odd_here = fix("function", id="above", diagnose=lambda *_: not_understood("it is odd"))
    whole = Installation([broken, replace(odd_here, targets=(*odd_here.targets, more))], (), False)
    whole.apply()
    assert extension.Derived().own() == "own", "off in Megatron, a fix is off everywhere"
    whole.remove()
    sys.modules.pop("nvidia_resiliency_ext")


def test_layers_lie_as_declared_in_whatever_order_the_fixes_are_listed(toy: ModuleType) -> None:
    def named(original: Any, hit: Hit, name: str) -> Any:
        return lambda *args: f"{name} {original(*args)}"

    after = {"c": ("b", "a"), "b": ("a",), "a": ()}
    fixes = [
        Fix(id, (), "", (Target("toy_target", "function", partial(named, name=id)),), after=below)
        for id, below in after.items()
    ]
    installation = Installation(fixes, (), strict=True)
    installation.apply()
    assert toy.function() == "c b a function"
    installation.remove()


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

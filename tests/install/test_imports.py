"""when_imported: called once, at the end of an import, however far it had come."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from vime_optim import imports

NAMES = ("half_made_a", "half_made_b")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield tmp_path
    for name in NAMES:
        sys.modules.pop(name, None)
    CALLS.clear()


CALLS: list[tuple[str, bool]] = []


def note(module: ModuleType) -> None:
    CALLS.append((module.__name__, hasattr(module, "last")))


def fail(module: ModuleType) -> None:
    raise LookupError(module.__name__)


ASK = (
    "import test_imports\n"
    "from vime_optim import imports\n"
    "imports.when_imported({name!r}, test_imports.{hook})\n"
)


def write(folder: Path, name: str, *lines: str) -> None:
    (folder / f"{name}.py").write_text("\n".join([*lines, "last = 1", ""]))


def test_before_within_and_after_an_import(folder: Path) -> None:
    write(folder, "half_made_a", ASK.format(name="half_made_a", hook="note") * 2)
    imports.when_imported("half_made_a", note)
    assert CALLS == []
    module = importlib.import_module("half_made_a")
    assert CALLS == [("half_made_a", True)] * 3
    assert type(module.__spec__).__name__ == "ModuleSpec"
    assert "_vime" not in str(vars(module.__spec__))
    imports.when_imported("half_made_a", note)
    assert len(CALLS) == 4


def test_of_a_module_that_waits_for_another_one(folder: Path) -> None:
    write(folder, "half_made_a", "import half_made_b")
    write(folder, "half_made_b", ASK.format(name="half_made_a", hook="note"))
    importlib.import_module("half_made_a")
    assert CALLS == [("half_made_a", True)]


def test_an_import_that_fails_calls_nothing_until_one_succeeds(folder: Path) -> None:
    write(folder, "half_made_a", ASK.format(name="half_made_a", hook="note"), "1 / 0")
    with pytest.raises(ZeroDivisionError):
        importlib.import_module("half_made_a")
    assert CALLS == []
    write(folder, "half_made_a", "x = 'longer than before, so that no old bytecode fits'")
    importlib.import_module("half_made_a")
    assert CALLS == [("half_made_a", True)]


def test_what_the_call_raises_the_import_raises(folder: Path) -> None:
    write(folder, "half_made_a", ASK.format(name="half_made_a", hook="fail"))
    for _ in range(2):
        with pytest.raises(LookupError, match="half_made_a"):
            importlib.import_module("half_made_a")
        assert "half_made_a" not in sys.modules


def test_while_another_thread_imports(folder: Path) -> None:
    write(
        folder,
        "half_made_a",
        "import test_imports",
        "test_imports.STARTED.set()",
        "test_imports.GO_ON.wait(60)",
    )
    thread = threading.Thread(target=importlib.import_module, args=("half_made_a",))
    thread.start()
    assert STARTED.wait(60)
    assert not imports.is_loaded("half_made_a")
    imports.when_imported("half_made_a", note)
    assert CALLS == []
    GO_ON.set()
    thread.join(60)
    assert CALLS == [("half_made_a", True)]


STARTED = threading.Event()
GO_ON = threading.Event()

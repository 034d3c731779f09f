"""Settings that are misspelt, or differ at a second install(), are refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import vime_optim
from vime_optim import settings
from vime_optim.errors import SettingsError


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("VIME_OPTIM_SHARDIN", "VIME_OPTIM_SHARDING"),
        ("VIME_OPTIM_SKIPS", "VIME_OPTIM_SKIP"),
        ("VIME_OPTIM_ASYNC_MODE", "VIME_OPTIM_ASYNC"),
        ("VIME_OPTIM_WRITER_TIMEOUT", "VIME_OPTIM_WRITER_TIMEOUT_S"),
        ("VIME_OPTIM_STRICTNESS", "VIME_OPTIM_STRICT"),
        ("vime_optim_skip", "VIME_OPTIM_SKIP"),
    ],
)
def test_a_misspelt_variable_is_refused(name: str, meant: str) -> None:
    with pytest.raises(SettingsError) as caught:
        settings.Settings.load({name: "1"})
    assert name in str(caught.value)
    assert meant in str(caught.value)


def test_variables_of_tools_and_of_others_are_not() -> None:
    others = dict.fromkeys(settings.OTHER_VARIABLES, "1")
    environment = {**others, "VIME_OPTIM_TEST_RANKS": "2", "VIME_OPTIM_HOME": "/x", "SKIP": "1"}
    assert settings.Settings.load(environment) == settings.Settings()
    assert settings.unknown_variables(environment) == {"VIME_OPTIM_HOME": ""}


def test_every_variable_that_the_project_reads_is_known() -> None:
    """So that none of them is taken for a misspelt setting, nor told to be read by nothing."""
    root = Path(__file__).parents[2]
    files = [p for top in ("vime_optim", "tests", "benchmarks") for p in (root / top).rglob("*.py")]
    files += [root / "Makefile", root / ".ci" / "run"]
    named = {
        name
        for file in files
        if file != Path(__file__)
        for name in re.findall(r"VIME_OPTIM_[A-Z0-9_]*[A-Z0-9]", file.read_text())
    }
    assert "VIME_OPTIM_CACHE_DIR" in named
    assert settings.unknown_variables(dict.fromkeys(named, "1")) == {}


@pytest.fixture
def _uninstalled() -> object:
    vime_optim.uninstall()
    yield
    vime_optim.uninstall()


@pytest.mark.usefixtures("_uninstalled")
def test_a_second_install_asks_for_nothing_or_the_same() -> None:
    vime_optim.install(skip="F17", sharding="off", strict=False)
    for same in ({}, {"sharding": "off"}, {"skip": "copy-back-order"}, {"strict": "no"}):
        assert vime_optim.install(**same).installed
    for other in ({"sharding": "error"}, {"skip": "F1"}, {"strict": True}, {"only": "F24"}):
        with pytest.raises(SettingsError) as caught:
            vime_optim.install(**other)
        assert next(iter(other)) in str(caught.value)
        assert "uninstall()" in str(caught.value)
    assert settings.current().sharding == "off"
    vime_optim.uninstall()
    vime_optim.install(sharding="error")
    assert settings.current().sharding == "error"


@pytest.mark.parametrize(
    ("text", "value"),
    [(None, "off"), ("read", "read"), ("all", "all"), ("1", "all"), ("off", "off"), ("0", "off")],
)
def test_verify_was_a_flag(text: str | None, value: str) -> None:
    environ = {} if text is None else {"VIME_OPTIM_VERIFY": text}
    assert settings.Settings.load(environ).verify == value


def test_verify_as_an_argument() -> None:
    assert settings.Settings.load({}, verify=True).verify == "all"
    assert settings.Settings.load({}, verify=False).verify == "off"
    with pytest.raises(SettingsError, match="one of read, all, off"):
        settings.Settings.load({}, verify="sometimes")

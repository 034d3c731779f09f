"""What the doctor finds, and what it says to do about it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from vime_optim import cli
from vime_optim.tools import doctor
from vime_optim.tools.megatron_source import fetch


@pytest.fixture
def no_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [entry for entry in sys.path if not (Path(entry or ".") / "megatron").is_dir()]
    monkeypatch.setattr(sys, "path", kept)


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_says_that_megatron_is_missing(no_megatron: None) -> None:
    found = doctor.examine()
    assert found.facts["megatron-core"] == "not found"
    assert any("PYTHONPATH" in text for text in found.advice)
    assert not found.fixes


def test_unrelated_apex_is_named(
    no_megatron: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tree(tmp_path, {"apex/__init__.py": ""})))
    found = doctor.examine()
    assert found.facts["Apex"] == "the unrelated project of that name"
    assert any("pip uninstall apex" in text for text in found.advice)


def test_unreadable_setting_is_advice_and_no_crash(
    no_megatron: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VIME_OPTIM_WRITER_TIMEOUT_S", "soon")
    found = doctor.examine()
    assert "VIME_OPTIM_WRITER_TIMEOUT_S=soon" in found.facts["settings"]
    assert any("VIME_OPTIM_WRITER_TIMEOUT_S" in text for text in found.advice)


def test_old_megatron_is_refused(
    no_megatron: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "megatron/core/__init__.py": "",
        "megatron/core/package_info.py": "MAJOR = 0\nMINOR = 13\nPATCH = 1\n",
    }
    monkeypatch.syspath_prepend(str(tree(tmp_path, files)))
    found = doctor.examine()
    assert "0.13.1" in found.facts["megatron-core"]
    assert any("upgrade megatron-core" in text for text in found.advice)


def test_megatron_that_cannot_be_imported_is_told(
    no_megatron: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"megatron/core/__init__.py": "raise RuntimeError('broken tree')\n"}
    monkeypatch.syspath_prepend(str(tree(tmp_path, files)))
    found = doctor.examine()
    told = " ".join([*found.facts.values(), *found.advice])
    assert "broken tree" in told
    assert found.advice


def test_command_prints_facts_and_fixes(
    no_megatron: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_machine", lambda found: None)  # /dev/shm differs by machine
    monkeypatch.setattr(sys, "path", [*sys.path])
    status = cli.main(["doctor", "--json", "--megatron", str(fetch("0.16.1"))])
    found = json.loads(capsys.readouterr().out)
    assert status == (1 if found["advice"] else 0)
    assert found["fixes"]["step"] == "needed, applied"
    assert found["fixes"]["copy-back-order"] == "fixed upstream"
    assert "0.16.1" in found["facts"]["megatron-core"]
    assert "tied embeddings" in found["facts"]["never exact"]


def test_text_is_aligned_and_complete() -> None:
    found = doctor.DoctorReport(
        {"torch": "2.13", "a longer name": "x"}, {"step": "needed"}, ["do it"]
    )
    lines = str(found).splitlines()
    assert lines[0].index("2.13") == lines[1].index("x")
    assert lines[-1] == "- do it"
    assert str(doctor.DoctorReport()).endswith("- nothing: call vime_optim.install()")

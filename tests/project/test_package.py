"""What a release consists of: metadata, patches, changelog; in a checkout and in an sdist."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from vime_optim import __version__, cli
from vime_optim.errors import SettingsError, VimeOptimError
from vime_optim.tools import patch_files
from vime_optim.tools.megatron_source import RELEASES

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it there
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


def test_metadata_says_what_is_true() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert all((ROOT / name).exists() for name in project["license-files"])
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    oldest = project["requires-python"].removeprefix(">=")
    named = [c.rsplit(" ", 1)[1] for c in project["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert named[0] == oldest
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in named


def test_changelog_has_the_versions() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    heads = re.findall(r"^## (\S+)", text, re.M)
    assert heads[0] == "Unreleased" or heads[0] == __version__
    versions = [tuple(map(int, head.split("."))) for head in heads if head != "Unreleased"]
    assert versions == sorted(set(versions), reverse=True)
    assert versions[-1] == (0, 1, 0)


def test_patches_of_every_release_can_be_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert patch_files.releases() == list(RELEASES)
    out = tmp_path / "patches"
    assert cli.main(["patches", "--release", "0.16.1", "--out", str(out), "--json"]) == 0
    written = json.loads(capsys.readouterr().out)["patches"]
    source = ROOT / "patches" / "0.16.1"
    assert {Path(p).name: Path(p).read_bytes() for p in written} == {
        p.name: p.read_bytes() for p in source.glob("*.patch")
    }
    with pytest.raises(VimeOptimError, match="the output is in use"):
        patch_files.write("0.17.1", out)
    assert cli.main(["patches", "--release", "0.19.2"]) == 0
    assert re.search(r"0001-step\.patch +F1, F2, F3\n", capsys.readouterr().out)


def test_release_without_patches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"0\.16\.0[\s\S]*0\.15\.3, 0\.16\.1"):
        patch_files.write("0.16.0", tmp_path / "new")
    assert not (tmp_path / "new").exists()

"""The documentation is true: commands parse, generated pages are current, links and ids exist."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import save_load, stall, topology8
from docs import generate, make_matrix
from tests.matrix import COLUMNS, spread
from vime_optim import __version__, cli, hooks
from vime_optim.fixes import FIXES

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), ROOT / "patches" / "README.md"])
FENCE = re.compile(r"^```(\w*).*?\n(.*?)^```", re.M | re.S)
INLINE = re.compile(r"`(vime-optim [^`\n]+)`")

#: Stand for a value in the text; any word that parses will do.
PLACEHOLDERS = {"DIR": "a", "A": "a", "B": "b", "NEW": "new", "OUT": "out", "GLOB": "*"}


def commands() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        text = page.read_text()
        found = INLINE.findall(text)
        lines = [line for _, body in FENCE.findall(text) for line in body.splitlines()]
        lines += [line[4:] for line in text.splitlines() if line.startswith("    vime-optim ")]
        for line in lines:
            command = line.removeprefix("$ ").strip()
            if re.match(r"vime-optim [a-z]+( |$)", command) and "[-h]" not in command:
                found.append(command)
        for command in dict.fromkeys(found):
            yield str(page.relative_to(ROOT)), command


def expand(command: str) -> list[str]:
    """The words of a command, its optional [parts] included, with placeholders filled in."""
    text = command.split("#")[0].replace("[", " ").replace("]", " ")
    words = shlex.split(text)[1:]
    types = {"T": "bfloat16", "X.Y.Z": "0.16.1"}
    return [PLACEHOLDERS.get(word, types.get(word, word)) for word in words]


@pytest.mark.parametrize(("page", "command"), sorted(set(commands())))
def test_command_parses(page: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = expand(command)
    if not words[1:]:  # named in a sentence
        assert words[0] in cli.COMMANDS
        return
    parser, runners = cli.build_parser(words[0])
    try:
        parsed = parser.parse_args(words)
    except SystemExit:
        pytest.fail(f"{page}: `{command}` does not parse: {capsys.readouterr().err}")
    assert parsed.command in runners


def test_there_are_commands_to_check() -> None:
    shown = {expand(command)[0] for _, command in commands()}
    assert shown >= {"verify", "inspect", "diff", "repair", "export", "import", "doctor"}


def test_wrong_command_would_be_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(pytest.fail.Exception):
        test_command_parses("x", "vime-optim verify --no-such-flag", capsys)


def benchmark_commands() -> Iterator[tuple[str, str]]:
    """Module and arguments of every `python -m benchmarks...` that a page shows."""
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        for module, rest in re.findall(r"python -m (benchmarks[\w.]*)( [^`\n]*)?", text):
            yield module, rest.split("#")[0].replace("...", "")


@pytest.mark.parametrize(("module", "rest"), sorted(set(benchmark_commands())))
def test_benchmark_command_parses(
    module: str, rest: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {
        "benchmarks": save_load._parse,
        "benchmarks.topology8": topology8._parse,
        "benchmarks.stall": stall._parse,
    }
    if module in known:
        known[module](shlex.split(rest))
        return
    assert not shlex.split(rest), "a parser of its own is needed to check arguments"
    monkeypatch.setattr("sys.argv", [module, "--help"])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(module).main()
    assert end.value.code == 0


@pytest.mark.parametrize("name", sorted(generate.pages()))
def test_generated_page_is_current(name: str) -> None:
    made = generate.pages()[name]
    assert (ROOT / "docs" / name).read_text() == made, "run: python -m docs.generate"


def test_faults_of_the_sidebar_are_current() -> None:
    made = (ROOT / "mkdocs.yml").read_text()
    assert generate.navigation(made) == made, "run: python -m docs.generate"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_hooks_that_are_shown_exist(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(r"vime_optim\.hooks\.(\w+)", text):
        assert callable(getattr(hooks, name)), name
    for name in re.findall(r"-m vime_optim\.(\w+)", text):
        assert (ROOT / "vime_optim" / f"{name}.py").exists() or (
            ROOT / "vime_optim" / name
        ).is_dir()


def test_quick_start_shows_the_line_that_install_says() -> None:
    line = (
        rf"^vime_optim {re.escape(__version__)}: \d+ fixes on megatron-core [\d.]+; \w+ enforced$"
    )
    assert re.search(line, (ROOT / "docs" / "quickstart.md").read_text(), re.M)


def _nav(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for value in entry.values() if isinstance(entry, dict) else entry:
            yield from _nav(value)


def test_nav_holds_every_page_once() -> None:
    nav = list(_nav(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(nav) == sorted(pages)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_exist(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_faults_name_fixes_and_patches_that_exist() -> None:
    known = {fix.id for fix in FIXES}
    named = generate.faults()
    assert [f["id"] for f in named] == [f"F{n}" for n in range(1, len(named) + 1)]
    for fault in named:
        assert set(fault["fixes"]) <= known, fault["id"]
        for module in fault.get("below", ()):
            assert (ROOT / "vime_optim" / f"{module}.py").is_file(), f"{fault['id']}: {module}"
        if "patch" in fault:
            files = list((ROOT / "patches").glob(f"*/{fault['patch']}.patch"))
            assert files, fault["patch"]
            assert all(re.search(rf"\b{fault['id']}\b", f.read_text()) for f in files)


def test_every_fault_of_a_fix_has_a_page_that_names_it() -> None:
    pages = {fault["id"]: fault for fault in generate.faults()}
    for fix in FIXES:
        assert (ROOT / "vime_optim" / "fixes" / f"{fix.id.replace('-', '_')}.py").is_file()
        for fault in fix.faults:
            assert fix.id in pages[fault]["fixes"], fault


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "images").glob("*.svg")))
def test_drawing_is_well_formed_and_used(path: Path) -> None:
    root = ElementTree.parse(path).getroot()
    assert root.get("aria-label")
    assert any(f"images/{path.name}" in page.read_text() for page in PAGES)


def test_matrix_page_counts_results() -> None:
    cases = [case.name for case in spread()]
    results = [{"case": name, "exact": True, "sound": True, "error": None} for name in cases]
    results[0] |= {"exact": False, "error": "KeyError: 'x'\nmore"}
    text = make_matrix.page(make_matrix.read("\n".join(map(json.dumps, results))))
    assert text == make_matrix.page(make_matrix.read(json.dumps(results)))
    assert f"{len(cases) - 1} of {len(cases)} cases are exact" in text
    assert f"- `{cases[0]}`: KeyError: 'x'" in text
    header = next(line for line in text.splitlines() if line.startswith("| optimizer"))
    assert [part.strip() for part in header.split("|")[2:-1]] == list(COLUMNS)

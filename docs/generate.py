"""Makes docs/faults/*.md, settings.md, cli.md, patches.md and the faults of mkdocs.yml's nav.

Run: python -m docs.generate

tests/project/test_docs.py fails when what is committed differs from what this makes.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from docs import badges
from vime_optim import cli
from vime_optim.settings import Settings

DOCS = Path(__file__).parent
MKDOCS = DOCS.parent / "mkdocs.yml"

#: What a reader sees first, in the order of the sidebar. A fault names one by `group`.
GROUPS = {
    "save": "A save fails",
    "load": "A load fails",
    "wrong": "Nothing fails, the run is another",
    "memory": "Memory and hangs",
}


def faults() -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = yaml.safe_load((DOCS / "faults.yml").read_text())
    return loaded


def fault_page(fault: dict[str, Any]) -> str:
    fixes = ", ".join(f"`{fix}`" for fix in fault["fixes"])
    lines = [
        f"# {fault['title']}",
        "",
        f"{fault['id']} · {GROUPS[fault['group']]}",
        "",
        "```text",
        fault["error"],
        "```",
        "",
        f"**When.** {fault['when']}.",
        "",
        f"**Cause.** {fault['cause']}",
        "",
        f"**What `install()` does.** {fault['does']}",
        "",
    ]
    if fixes:
        first = fault["fixes"][0]
        lines += [
            "**How to see that it worked.** `print(vime_optim.status())` after a save and a load:"
            f" the rows of {fixes} are `applied` (or `fixed upstream`) and the `hits` of `{first}`"
            " are above 0. `vime-optim verify` saves, loads and compares with your megatron-core.",
            "",
        ]
    if fixes:
        lines += [f"**In the code.** {_code(fault)}", ""]
    if "patch" in fault:
        lines += [
            f"**As a patch.** `{fault['patch']}.patch`, see [Patches](../patches.md).",
            "",
        ]
    if fault["refs"]:
        lines += [f"**Public reports.** {fault['refs']}.", ""]
    return "\n".join(lines)


def _code(fault: dict[str, Any]) -> str:
    files = [f"`vime_optim/fixes/{fix.replace('-', '_')}.py`" for fix in fault["fixes"]]
    below = [f"`vime_optim/{module}.py`" for module in fault.get("below", ())]
    called = f"; the work is done in {' and '.join(below)}" if below else ""
    return f"{', '.join(files)}{called}."


def fault_index() -> str:
    lines = [
        "# Faults",
        "",
        "What a user sees, and the page that explains it. Search for the text of your error.",
        "",
    ]
    for group, title in GROUPS.items():
        lines += [f"## {title}", "", "| fault | error | id |", "|---|---|---|"]
        lines += [
            f"| [{f['title']}]({f['id'].lower()}.md) | `{_first_line(f['error'])}` | {f['id']} |"
            for f in faults()
            if f["group"] == group
        ]
        lines.append("")
    lines += [
        "## Where each is mended",
        "",
        "The head of `NAME.py` says what it changes and why. Its test: `tests/fixes/test_NAME.py`.",
        "Where a fault's page says that the work is done elsewhere, begin there.",
        "",
        "| id | `vime_optim/fixes/` | patch |",
        "|---|---|---|",
    ]
    for fault in faults():
        modules = ", ".join(f"`{fix.replace('-', '_')}.py`" for fix in fault["fixes"])
        lines.append(
            f"| {fault['id']} | {modules or 'documented only'} | {fault.get('patch', '')} |"
        )
    return "\n".join([*lines, ""])


def causes() -> str:
    """What a failed case is explained with, as data of the package."""
    return json.dumps({f["id"]: f["cause"] for f in faults()}, indent=1) + "\n"


def navigation(text: str) -> str:
    """mkdocs.yml with the faults by what they do between its two marks."""
    begin, end = "  # faults: made by docs.generate\n", "  # faults: end\n"
    head, rest = text.split(begin)
    tail = rest.split(end)[1]
    lines = ["  - Faults:", "      - By what you see: faults/index.md"]
    for group, title in GROUPS.items():
        lines.append(f"      - {title}:")
        lines += [
            f'          - "{f["short"]}": faults/{f["id"].lower()}.md'
            for f in faults()
            if f["group"] == group
        ]
    return head + begin + "\n".join(lines) + "\n" + end + tail


def _first_line(text: str) -> str:
    return text.splitlines()[0].replace("|", "\\|").replace("`", "")


def settings_page() -> str:
    lines = [
        "# Settings",
        "",
        "An argument of `install()` wins over the environment, the environment over the default.",
        "",
        "| argument | environment variable | default | meaning |",
        "|---|---|---|---|",
    ]
    for spec in fields(Settings):
        default = "none" if spec.default == () else f"`{spec.default}`"
        doc = spec.metadata["doc"].replace("|", "\\|")
        lines.append(f"| `{spec.name}` | `{spec.metadata['env']}` | {default} | {doc} |")
    return "\n".join([*lines, ""])


def cli_page() -> str:
    lines = [
        "# Command line",
        "",
        "Every command exits with 0 when all is well, 1 when a check failed and 2 when it could"
        " not be run; `plan` with 1 when sizes admit no plan. The checkpoint commands are explained"
        " in [Tools](tools.md).",
        "",
    ]
    for name in cli.COMMANDS:
        lines += [f"## {name}", "", "```text", _help(name).rstrip(), "```", ""]
    return "\n".join(lines)


def _help(name: str) -> str:
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "90"
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            cli.main([name, "--help"])
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before
    return out.getvalue()


def patches_page() -> str:
    text = (DOCS.parent / "patches" / "README.md").read_text()
    return text.replace("`docs/faults/`", "[Faults](faults/index.md)")


#: Colours of the drawings, and what they are on a dark page.
DARK = {
    "#ffffff": "#1e2129",
    **dict.fromkeys(("#222", "#333", "#444"), "#e2e4e9"),
    **dict.fromkeys(("#555", "#777", "#888"), "#b0b4bf"),
    **dict.fromkeys(("#999", "#9aa0a6", "#bbb"), "#8a8f9b"),
    "#f1f3f4": "#2d313c",
    "#e6f4ea": "#1d3b2a",
    "#e8f0fe": "#1f3352",
    "#aecbfa": "#2c5494",
    "#a8dab5": "#2a6b42",
    "#f6aea9": "#8c3a35",
    "#fbbc04": "#a87f10",
    "#188038": "#4fc375",
    "#1a73e8": "#7eb0ff",
    "#d93025": "#ff7b72",
    "#b06000": "#f0a94a",
}


def dark_drawing(path: Path) -> str:
    """The drawing for a dark page."""
    return re.sub(
        r"#(?:[0-9a-fA-F]{6}|[0-9a-fA-F]{3})\b", lambda m: DARK[m[0].lower()], path.read_text()
    )


def drawings() -> list[Path]:
    """Those that are drawn by hand, for a light page."""
    made = ("_dark.svg", "badges.svg")
    return [
        path for path in sorted((DOCS / "images").glob("*.svg")) if not path.name.endswith(made)
    ]


def pages() -> dict[str, str]:
    """Path below docs/ to text."""
    made = {f"faults/{f['id'].lower()}.md": fault_page(f) for f in faults()}
    return {
        **made,
        **{f"images/{path.stem}_dark.svg": dark_drawing(path) for path in drawings()},
        "faults/index.md": fault_index(),
        "../vime_optim/verify/causes.json": causes(),
        "settings.md": settings_page(),
        "cli.md": cli_page(),
        "patches.md": patches_page(),
        "images/badges.svg": badges.drawing(),
    }


if __name__ == "__main__":
    for name, text in pages().items():
        (DOCS / name).parent.mkdir(exist_ok=True)
        (DOCS / name).write_text(text)
    MKDOCS.write_text(navigation(MKDOCS.read_text()))

"""The badges of README.md as one drawing, made from what the repository itself says."""

from __future__ import annotations

import re
from pathlib import Path

from vime_optim.tools.megatron_source import RELEASES

ROOT = Path(__file__).parent.parent
HEIGHT, GAP = 20, 6
_CHARACTER = 6.6
_PADDING = 12


def facts() -> list[tuple[str, str]]:
    """Label and value of each badge."""
    project = (ROOT / "pyproject.toml").read_text()
    pythons = re.findall(r"Python :: (3\.\d+)", project)
    licence = re.findall(r'^license = "([^"]+)"', project, re.M)
    exact = re.findall(
        r"^\**(\d+ of \d+) cases are exact", (ROOT / "docs/matrix.md").read_text(), re.M
    )
    return [
        ("license", licence[0]),
        ("python", f"{pythons[0]} to {pythons[-1]}"),
        ("megatron-core", f"{RELEASES[0]} to {RELEASES[-1]}"),
        ("exact resumes", exact[0]),
    ]


def drawing() -> str:
    """SVG of all badges in a row."""
    parts, x = [], 0
    for label, value in facts():
        left, right = (round(len(text) * _CHARACTER + _PADDING) for text in (label, value))
        parts += [
            f'<rect x="{x}" width="{left}" height="{HEIGHT}" fill="#444c56"/>',
            f'<rect x="{x + left}" width="{right}" height="{HEIGHT}" fill="#1a7f37"/>',
            f'<text x="{x + left / 2:g}" y="14">{label}</text>',
            f'<text x="{x + left + right / 2:g}" y="14">{value}</text>',
        ]
        x += left + right + GAP
    told = "; ".join(f"{label}: {value}" for label, value in facts())
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{x - GAP}" height="{HEIGHT}" role="img"'
        f' aria-label="{told}" fill="#fff" text-anchor="middle"'
        ' font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">'
    )
    return "\n".join([head, *parts, "</svg>", ""])

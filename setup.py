"""What pyproject.toml cannot say: the patches are in the wheel, and links work on a package index.

VIME_OPTIM_REPOSITORY, the address of the repository, makes the README's links absolute and gives
the project its URLs (`make dist REPOSITORY=...`). Without it a link becomes the name of the file.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")


def version() -> str:
    text = (ROOT / "vime_optim" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"', text, re.M)
    assert found is not None
    return found[1]


def readme(repository: str) -> str:
    def absolute(match: re.Match[str]) -> str:
        image, text, path = match.groups()
        if repository:
            kind = "raw" if image else "blob"
            return f"{image}[{text}]({repository}/{kind}/v{version()}/{path})"
        return "" if image else f"{text} (`{path}`)"

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    parts = re.split(r"(^```.*?^```)", text, flags=re.M | re.S)  # code stays as it is
    return "".join(part if part.startswith("```") else LINK.sub(absolute, part) for part in parts)


def urls(repository: str) -> dict[str, str]:
    if not repository:
        return {}
    return {
        "Homepage": repository,
        "Documentation": f"{repository}/tree/v{version()}/docs",
        "Changelog": f"{repository}/blob/v{version()}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


class BuildWithPatches(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "vime_optim" / "patches"
            shutil.rmtree(target, ignore_errors=True)
            made_from = shutil.ignore_patterns("src", "*.py", "__pycache__")
            shutil.copytree(ROOT / "patches", target, ignore=made_from)


repository = os.environ.get("VIME_OPTIM_REPOSITORY", "").rstrip("/")
setup(
    cmdclass={"build_py": BuildWithPatches},
    long_description=readme(repository),
    long_description_content_type="text/markdown",
    project_urls=urls(repository),
)

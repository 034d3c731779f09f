"""Templates by home, the least recently used one closed when there are too many."""

from __future__ import annotations

import tempfile
from pathlib import Path

from clients import nvrx, trees
from clients.cases import Case
from clients.client import Home, Template

#: Template processes kept alive at once; each holds an imported torch and Megatron-LM.
MAX_TEMPLATES = 2


class Pool:
    """Open templates of one test process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[Home, Template] = {}

    def template_of(self, case: Case, tree: str) -> Template:
        """A template that can run the case.

        Raises:
            NoTree: there is no such tree here.
        """
        home = Home(
            tree=trees.find(tree),
            nvrx=nvrx.find() if case.nvrx else None,
            install_first=case.install == "first",
        )
        template = self._open.pop(home, None)
        if template is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            template = Template(home, Path(tempfile.mkdtemp(dir=self._folder, prefix=f"{tree}.")))
        self._open[home] = template
        while len(self._open) > MAX_TEMPLATES:
            self._open.pop(next(iter(self._open))).close()
        return template

    def close(self) -> None:
        for template in self._open.values():
            template.close()
        self._open.clear()

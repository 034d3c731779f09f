"""What a search in the built documentation finds, by its own index: python -m docs.check.

`mkdocs build --strict` has checked the links and their anchors already.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

SITE = Path(__file__).parent.parent / "site"

#: What people type, and the page that must be found.
SEARCHES = {
    "UnpicklingError": "faults/f9.html",
    "pip install": "install.html",
    "--use-precision-aware-optimizer": "quickstart.html",
    "--optimizer-cpu-offload": "quickstart.html",
    "--external_plugins": "usage.html",
    "VERL_USE_EXTERNAL_MODULES": "usage.html",
    "VIME_OPTIM_SKIP": "settings.html",
    "Cannot merge two lists": "faults/f2.html",
    "F14": "faults/f14.html",
    "HDO": "glossary.html",
    "vime-optim repair": "tools.html",
}


def found(query: str, index: dict[str, object]) -> set[str]:
    """Pages that hold every word of a query, split as the index splits."""
    separator = index["config"]["separator"]  # type: ignore[index]
    split = re.compile(separator)
    words = {word.lower() for word in split.split(query) if word}
    texts: dict[str, str] = {}
    for entry in index["docs"]:  # type: ignore[attr-defined]
        page = entry["location"].split("#")[0] or "index.html"
        texts[page] = texts.get(page, "") + f" {entry['title']} {entry['text']}"
    return {
        page for page, text in texts.items() if words <= {w.lower() for w in split.split(text) if w}
    }


def main() -> int:
    index = json.loads((SITE / "search" / "search_index.json").read_text())
    missing = {query: page for query, page in SEARCHES.items() if page not in found(query, index)}
    for query, page in missing.items():
        print(f"a search for {query!r} does not find {page}, only {sorted(found(query, index))}")
    print(f"{len(SEARCHES) - len(missing)} of {len(SEARCHES)} searches find their page")
    return 1 if missing else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Makes patches/<release>/*.patch from patches/src/*.txt and the releases' own files.

Run: python -m patches.generate [--check], or `make patches`

A source holds the head, then for each file (`+++ path`) its edits. An edit names the function in
which it lies (`@@ def name`: the first of that name in the file) and as many lines as find the
place; the first match is meant. Context and line numbers are those of each release.
"""

from __future__ import annotations

import difflib
import re
import sys
from pathlib import Path

from vime_optim.errors import VimeOptimError
from vime_optim.tools.megatron_source import RELEASES, fetch

PATCHES = Path(__file__).parent


def edited(before: list[str], edits: str, what: str) -> list[str]:
    """The lines of a file after the edits of a source, each of which must find its place."""
    lines = list(before)
    for edit in edits.split("@@ def ")[1:]:
        function, *body = edit.splitlines()
        old = [line[1:] for line in body if line[:1] in (" ", "-")]
        new = [line[1:] for line in body if line[:1] in (" ", "+")]
        heads = [i for i, line in enumerate(lines) if line.lstrip().startswith(f"def {function}(")]
        start = heads[0] if heads else len(lines)
        for i in range(start, len(lines)):
            if lines[i : i + len(old)] == old:
                lines[i : i + len(old)] = new
                break
        else:
            raise VimeOptimError("an edit finds no place", where=f"{what}: {function}", got=old[0])
    return lines


def patch(source: str, release: str, tree: Path) -> str:
    """The text of a patch for the release whose files lie in `tree`."""
    head, *files = re.split(r"^\+\+\+ ", source, flags=re.M)
    head = re.sub(
        r"^Releases: .*", rf"\g<0>; this file is for megatron-core {release}", head, flags=re.M
    )
    diffs = []
    for text in files:
        name, edits = text.rstrip("\n").split("\n", 1)
        before = (tree / name).read_text(encoding="utf-8").splitlines()
        after = edited(before, edits, f"{head.splitlines()[0]}, {release}, {name}")
        lines = difflib.unified_diff(before, after, f"a/{name}", f"b/{name}", lineterm="")
        diffs.append("\n".join([f"diff --git a/{name} b/{name}", *lines]) + "\n")
    return head + "".join(diffs)


def generated(release: str, tree: Path) -> dict[str, str]:
    """Texts of a release's patches by file name."""
    texts = {}
    for path in sorted((PATCHES / "src").glob("*.txt")):
        source = path.read_text(encoding="utf-8")
        (releases,) = re.findall(r"^Releases: ([\d. ]+)", source, re.M)
        if release in releases.split():
            texts[f"{path.stem}.patch"] = patch(source, release, tree)
    return texts


def committed(release: str) -> dict[str, str]:
    """Texts that lie in the release's folder by file name."""
    found = (PATCHES / release).glob("*.patch")
    return {path.name: path.read_text(encoding="utf-8") for path in found}


def main() -> int:
    check, stale = "--check" in sys.argv[1:], False
    for release in RELEASES:
        try:
            tree = fetch(release)
        except VimeOptimError as error:
            print(f"{release}: not looked at, for there are no files of it: {error}")
            stale = True
            continue
        new, old = generated(release, tree), committed(release)
        changed = sorted(name for name in {*new, *old} if new.get(name) != old.get(name))
        print(f"{release}: {len(new)} patches, {len(changed)} differ", *changed)
        stale = stale or bool(check and changed)
        for name in [] if check else changed:
            path = PATCHES / release / name
            path.parent.mkdir(exist_ok=True)
            if name in new:
                path.write_text(new[name], encoding="utf-8")
            else:
                path.unlink()
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())

"""`vime-optim patches`: the correctness fixes as diffs, for people who build images."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

from vime_optim.errors import SettingsError, VimeOptimError

_HEAD_LINE = re.compile(r"^Faults?:\s*(.+)$", re.M)


def folder() -> Path:
    """The patches: in an installed package inside it, in a checkout beside the package."""
    package = Path(__file__).resolve().parents[1]
    places = (package / "patches", package.parent / "patches")
    for place in places:
        if (place / "README.md").is_file():
            return place
    raise VimeOptimError("the patches are missing from this installation", where=str(package))


def releases() -> list[str]:
    """The releases of megatron-core that have patches, oldest first."""
    found = {path.parent.name for path in folder().glob("*/*.patch")}
    return sorted(found, key=lambda name: tuple(map(int, name.split("."))))


def of_release(release: str) -> list[Path]:
    """The patches of one release, in the order in which they apply.

    Raises:
        SettingsError: there are none for it.
    """
    if release not in releases():
        raise SettingsError(
            "there are no patches for this release of megatron-core",
            got=release,
            expected=", ".join(releases()),
            next_step="use vime_optim.install(), which looks at the code that is there",
        )
    return sorted((folder() / release).glob("*.patch"))


def write(release: str, out: Path) -> list[Path]:
    """Copy a release's patches into a new or empty directory; returns the copies.

    Raises:
        SettingsError: no patches for the release.
        VimeOptimError: the directory is in use or cannot be written.
    """
    patches = of_release(release)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise VimeOptimError(
            "the output is in use",
            where=str(out),
            expected="a new or empty directory, so that no patch of another release is among them",
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        return [Path(shutil.copyfile(patch, out / patch.name)) for patch in patches]
    except OSError as error:
        raise VimeOptimError(
            "the output cannot be written", where=str(out), got=error.strerror
        ) from None


def add_patches_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--release", help="of megatron-core (default: the one that import takes)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="a new directory to write them to")
    parser.add_argument("--json", action="store_true", help="as one JSON object")


def run_patches(args: argparse.Namespace) -> int:
    """Lists the patches of a release, or writes them."""
    release = args.release or _found_release()
    paths = of_release(release) if args.out is None else write(release, args.out)
    if args.json:
        print(json.dumps({"release": release, "patches": [str(path) for path in paths]}, indent=1))
        return 0
    print(f"patches for megatron-core {release}")
    for path in paths:
        print(path if args.out is not None else f"  {path.name:<32}{_faults(path)}")
    if args.out is not None:
        print(f"apply them in the folder that holds megatron/: git apply {args.out}/*.patch")
    return 0


def _faults(patch: Path) -> str:
    found = _HEAD_LINE.search(patch.read_text(encoding="utf-8"))
    return found[1] if found else ""


def _found_release() -> str:
    from vime_optim.compat import find_megatron

    megatron = find_megatron()
    if megatron is None or megatron.version is None:
        raise SettingsError(
            "megatron-core is not found, so its release is not known",
            expected="--release with one of " + ", ".join(releases()),
        )
    return str(megatron.version)

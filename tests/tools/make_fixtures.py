"""Writes the checkpoints that the tests read, by stock megatron-core on the simulated device.

    python tests/tools/make_fixtures.py FOLDER_OF_RELEASES [NAME ...]

FOLDER_OF_RELEASES holds unpacked wheels: 0.15.3/, 0.16.1/, 0.19.2/. Each checkpoint becomes one
`fixtures/NAME.tar.xz`. The F2 one comes from a copy of 0.15.3 with the widespread patch that skips
`step` where bucket tensors are turned into sharded ones.
"""

from __future__ import annotations

import io
import lzma
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PATCH_BEFORE = "                        for key in tensors:\n"
PATCH_SKIP = (
    PATCH_BEFORE + "                            if key == 'step':\n"
    "                                continue\n"
)

CASES = {
    "full_0.15.3": ("0.15.3", "fused,nopao,fully_reshardable,1bucket,dp=2,stock"),
    "full_0.16.1": ("0.16.1", "fused,nopao,fully_reshardable,1bucket,dp=2,stock"),
    "full_0.19.2": ("0.19.2", "fused,nopao,fully_reshardable,1bucket,dp=2,stock"),
    "full_0.16.1_dp3": ("0.16.1", "fused,nopao,fully_reshardable,1bucket,dp=3,stock"),
    "dp_0.15.3": ("0.15.3", "fused,nopao,dp_reshardable,1bucket,dp=2,stock"),
    "dp_0.16.1": ("0.16.1", "fused,nopao,dp_reshardable,1bucket,dp=2,stock"),
    "dp_0.19.2": ("0.19.2", "fused,nopao,dp_reshardable,1bucket,dp=2,stock"),
    "f2_0.15.3": ("f2", "hybrid,pao,f=1,dp_reshardable,dp=3,stock"),
    "f3_0.16.1": ("0.16.1", "hybrid,pao,f=1,dp_reshardable,dp=2,stock"),
    "f9_0.15.3": ("0.15.3", "hybrid,pao,f=1,fully_reshardable,1bucket,dp=2,stock"),
    "tp2_dp_0.16.1": ("0.16.1", "fused,nopao,dp_reshardable,1bucket,dp=2,tp=2,stock"),
    "tp2_full_0.16.1": ("0.16.1", "fused,nopao,fully_reshardable,1bucket,dp=2,tp=2,stock"),
    "moe_dp_0.19.2": ("0.19.2", "fused,nopao,moe,dp_reshardable,1bucket,dp=2,ep=2,stock"),
    "moe_full_0.19.2": ("0.19.2", "fused,nopao,moe,fully_reshardable,1bucket,dp=2,ep=2,stock"),
}


def patched_tree(releases: Path, scratch: Path) -> Path:
    """A copy of 0.15.3 with the patch that writes F2 checkpoints."""
    tree = scratch / "f2"
    shutil.copytree(releases / "0.15.3", tree, ignore=shutil.ignore_patterns("__pycache__"))
    source = tree / "megatron/core/optimizer/distrib_optimizer.py"
    text = source.read_text()
    if text.count(PATCH_BEFORE) != 1:
        raise SystemExit("0.15.3 is not as expected: the loop over bucket tensors was not found")
    source.write_text(text.replace(PATCH_BEFORE, PATCH_SKIP))
    return tree


def write(name: str, tree: Path, spelling: str, scratch: Path) -> None:
    """Runs one case and packs its checkpoint."""
    from tests.cases import Case
    from vime_optim.verify.launch import open_launcher

    case = Case.parse(spelling)
    with open_launcher(tree) as launcher:
        payload = {
            "case": case.to_dict(),
            "directory": str(scratch / name),
            "captures": str(scratch / f"{name}-captures"),
        }
        world = case.layout.world_size
        launcher.run(
            "tests.tools.fixture_job:save",
            world_size=world,
            payload=payload,
            out=scratch / f"{name}-logs",
        )
    pack(sorted((scratch / name).glob("iter_*"))[-1], HERE / "fixtures" / f"{name}.tar.xz")


def pack(checkpoint: Path, target: Path) -> None:
    """A tar without names, times or owners, so that the same checkpoint gives the same archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path in sorted(checkpoint.iterdir()):
            info = tarfile.TarInfo(path.name)
            info.size, info.mode = path.stat().st_size, 0o644
            archive.addfile(info, io.BytesIO(path.read_bytes()))
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(lzma.compress(buffer.getvalue(), preset=9))
    print(f"{target.name}: {target.stat().st_size} bytes")


def main(arguments: list[str]) -> None:
    releases, names = Path(arguments[0]).resolve(), arguments[1:] or list(CASES)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        trees: dict[str, Any] = {}
        for name in names:
            release, spelling = CASES[name]
            if release not in trees:
                trees[release] = (
                    patched_tree(releases, scratch) if release == "f2" else releases / release
                )
            write(name, trees[release], spelling, scratch)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent.parent))
    main(sys.argv[1:])

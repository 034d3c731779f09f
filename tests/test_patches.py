"""The patches apply to the real wheels, make them resume exactly, and are seen by install()."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from patches import generate
from tests.cases import Case
from vime_optim.errors import VimeOptimError
from vime_optim.simulate import bootstrap_env
from vime_optim.tools.megatron_source import RELEASES, fetch
from vime_optim.verify.launch import ForkLauncher
from vime_optim.verify.runner import run_case

PATCHES = Path(__file__).parent.parent / "patches"
TreeOf = Callable[[str], Path]
ALL = [path for release in RELEASES for path in sorted((PATCHES / release).glob("*.patch"))]

#: Resumed on patched trees without install(): in the CI, on two releases; `make matrix` runs all.
CASES = (
    "hybrid,pao,f=0.5,dp=2,dp_reshardable",
    "hybrid,nopao,f=0.5,dp=3->2",
    "torch,dp=2,dp_reshardable",
    "fused,pao,dp=2",
    "hybrid,pao,f=1,dp=2,dp_reshardable",
    "hybrid,pao,f=1,dp=3->2,1bucket",
    "hybrid,pao,f=1,dp=2,default",
    "hybrid,pao,f=1,dp=2,model-only",
    "hybrid,nopao,f=1,dp=2,model-only",
    "hybrid,nopao,f=0.5,dp=2,dp_reshardable",
    "torch,dp=2->3",
    "fused,pao,dp=2,dp_reshardable",
    "fused,pao,dp=3->2",
    "fused,nopao,dp=2->1,fp32norm,noqk,1bucket",
    "fused,nopao,dp=2,groups=max_lr",
    "fused,nopao,dp=2,moe,ep=2,train=experts",
    "fused,nopao,dp=4,dp_reshardable,bucket=40",
    "torch,dp=1,pp=2,ep=1,moe,moe-on=first",
    "fused,apex,nopao,dp=3->2,1bucket",
    "hybrid,apex,pao,f=0.5,dp=2",
    "hybrid,apex,nopao,f=0.25,dp=2,dp_reshardable",
)
IN_CI = {
    *(("0.19.2", case) for case in CASES[:2]),
    ("0.15.3", CASES[0]),
    ("0.15.3", "fused,pao,dp=2,dp_reshardable"),
    ("0.19.2", "torch,dp=2,dp_reshardable"),
    ("0.19.2", "fused,nopao,dp=4,dp_reshardable,bucket=40"),
    ("0.15.3", "fused,nopao,dp=2,moe,ep=2,train=experts"),
}


def touched(patch: Path) -> list[str]:
    return re.findall(r"^\+\+\+ b/(\S+)$", patch.read_text(), re.M)


def apply(tool: str, tree: Path, patch: Path) -> None:
    # GNU patch would accept a context that only resembles; git would look for a repository above.
    command = ["git", "apply", str(patch)] if tool == "git" else ["patch", "-p1", "-F0", "-s"]
    done = subprocess.run(
        command,
        cwd=tree,
        stdin=None if tool == "git" else patch.open(),
        env={"PATH": "/usr/bin:/bin:/usr/local/bin", "GIT_CEILING_DIRECTORIES": str(tree.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{tool}: {patch.name}: {done.stdout}{done.stderr}"


def copy_files(release: str, names: list[str], target: Path) -> Path:
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(fetch(release) / name, target / name)
    return target


@pytest.mark.parametrize("release", RELEASES)
def test_committed_are_what_the_sources_make(release: str) -> None:
    made = generate.generated(release, fetch(release))
    assert made
    assert generate.committed(release) == made, "run: make patches"


def test_edit_that_finds_no_place_is_refused() -> None:
    before = ["    def f(self):", "        return 1", "    def g(self):", "        return 2"]
    edit = "@@ def g\n-        return {}\n+        return 3\n"
    assert generate.edited(before, edit.format(2), "x") == [*before[:3], "        return 3"]
    with pytest.raises(VimeOptimError, match="finds no place"):
        generate.edited(before, edit.format(1), "x")  # it lies above the function


@pytest.mark.parametrize("tool", ["git", "patch"])
@pytest.mark.parametrize("path", ALL, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_applies_alone(path: Path, tool: str, tmp_path: Path) -> None:
    tree = copy_files(path.parent.name, touched(path), tmp_path / "tree")
    before = {name: (tree / name).read_text() for name in touched(path)}
    apply(tool, tree, path)
    for name in touched(path):
        text = (tree / name).read_text()
        compile(text, name, "exec")
        assert text != before[name]
        assert text.count(f"vime_optim: {path.stem[5:]}") > before[name].count("vime_optim")


@pytest.mark.parametrize("release", RELEASES)
def test_apply_in_order_with_both_tools(release: str, tmp_path: Path) -> None:
    patches = sorted((PATCHES / release).glob("*.patch"))
    assert patches
    names = sorted({name for path in patches for name in touched(path)})
    trees = {tool: copy_files(release, names, tmp_path / tool) for tool in ("git", "patch")}
    for tool, tree in trees.items():
        for path in patches:
            apply(tool, tree, path)
    for name in names:
        assert (trees["git"] / name).read_bytes() == (trees["patch"] / name).read_bytes()


@pytest.mark.parametrize("path", ALL, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_head_says_what_it_is(path: Path) -> None:
    head = path.read_text().split("\ndiff --git ", 1)[0]
    for label in ("Faults:", "Symptom:", "Change:", "Releases:", "Needs:", "See also:"):
        assert f"\n{label}" in head
    assert f"this file is for megatron-core {path.parent.name}" in head
    assert path.parent.name in head.split("Releases:")[1].split(";")[0]
    assert path.stem in (PATCHES / "README.md").read_text()


@pytest.fixture(scope="module")
def patched_tree(tmp_path_factory: pytest.TempPathFactory) -> TreeOf:
    made: dict[str, Path] = {}

    def tree_of(release: str) -> Path:
        if release not in made:
            tree = tmp_path_factory.mktemp("patched") / release
            shutil.copytree(fetch(release), tree)
            for path in sorted((PATCHES / release).glob("*.patch")):
                apply("git", tree, path)
            made[release] = tree
        return made[release]

    return tree_of


class Patched:
    """One launcher at a time, on a patched tree."""

    def __init__(self, tree_of: TreeOf) -> None:
        self.tree_of = tree_of
        self.release = ""
        self.launcher: ForkLauncher | None = None

    def get(self, release: str) -> ForkLauncher:
        if release != self.release:
            self.close()
            self.release = release
            self.launcher = ForkLauncher(self.tree_of(release))
        assert self.launcher is not None
        return self.launcher

    def close(self) -> None:
        if self.launcher is not None:
            self.launcher.close()


@pytest.fixture(scope="module")
def patched(patched_tree: TreeOf) -> Iterator[Patched]:
    pool = Patched(patched_tree)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("release", "case"),
    [
        pytest.param(r, c, marks=() if (r, c) in IN_CI else pytest.mark.matrix)
        for r in RELEASES
        for c in CASES
    ],
)
def test_resumes_exactly_without_install(
    release: str, case: str, patched: Patched, tmp_path: Path
) -> None:
    parsed = Case.parse(f"{case},stock", megatron=release)
    assert not parsed.install
    outcome = run_case(patched.get(release), parsed, tmp_path)
    assert outcome.exact, "\n".join([outcome.summary(), *outcome.differences[:20]])
    assert outcome.sound, outcome.summary()
    assert not any(outcome.hits.values())


@pytest.mark.parametrize(
    ("release", "case"),
    [
        ("0.15.3", CASES[0]),
        *(
            pytest.param(r, c, marks=pytest.mark.matrix)
            for r in RELEASES
            for c in CASES
            if (r, c) != ("0.15.3", CASES[0])
        ),
    ],
)
def test_install_on_top_resumes_exactly(
    release: str, case: str, patched: Patched, tmp_path: Path
) -> None:
    parsed = Case.parse(case, megatron=release)
    outcome = run_case(patched.get(release), parsed, tmp_path)
    assert outcome.exact, "\n".join([outcome.summary(), *outcome.differences[:20]])
    assert outcome.sound, outcome.summary()


STATUS = """
import json, vime_optim
vime_optim.install()
import megatron.core.optimizer.distrib_optimizer
print(json.dumps([(r.fix, r.target.split(".")[-1], r.verdict, r.applied)
                  for r in vime_optim.status().rows]))
"""

FOUND = {
    ("step", "_get_main_param_and_optimizer_states"),
    ("canonical-master", "get_parameter_state_dp_zero"),
    ("hybrid-restore", "_sync_hdo_param_groups_to_sub_optimizers"),
    ("hybrid-restore", "_update_fp32_params_by_new_state"),
    ("hybrid-restore", "_sync_hdo_state_to_sub_optimizers"),
    ("hybrid-restore", "_move_new_state_to_right_device"),
    ("inert-state", "dummy_step"),
    ("hybrid-refresh", "update_fp32_param_by_new_param"),
    ("copy-back-order", "_register_param_copy_back_gpu_hook"),
    ("fine-tune", "_copy_model_params_to_main_params"),
}


@pytest.mark.parametrize("release", ["0.15.3", "0.19.2"])
def test_install_sees_the_patches(release: str, patched_tree: TreeOf) -> None:
    def fixed(tree: Path) -> set[tuple[str, str]]:
        env = bootstrap_env(os.environ)
        env["PYTHONPATH"] = f"{tree}:{env['PYTHONPATH']}"
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", STATUS],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        rows = json.loads(done.stdout.splitlines()[-1])
        assert all(verdict != "fixed upstream" or not applied for _, _, verdict, applied in rows)
        return {(fix, name) for fix, name, verdict, _ in rows if verdict == "fixed upstream"}

    assert fixed(patched_tree(release)) >= FOUND
    right_already = {("copy-back-order", "_register_param_copy_back_gpu_hook")}
    assert fixed(fetch(release)) & FOUND == (set() if release == "0.15.3" else right_already)

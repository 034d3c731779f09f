"""A fix is in force as a whole or not at all, whenever its modules are imported, and says so.

Real megatron-core, with a line changed here and there in a copy.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from test_install import run_script

from vime_optim.tools.megatron_source import fetch

OPTIMIZER = "megatron/core/optimizer/optimizer.py"
DISTRIBUTED = "megatron/core/optimizer/distrib_optimizer.py"
LOADER = "megatron/core/dist_checkpointing/strategies/fully_parallel.py"

STATES = """
import logging
logging.basicConfig(format="%(message)s")
def states():
    rows = vime_optim.status().rows
    return {f"{row.fix}:{row.target.split('.')[-1]}": row.verdict for row in rows}
def applied():
    return sorted({row.fix for row in vime_optim.status().rows if row.applied})
"""


def changed(tree: Path, tmp_path: Path, file: str, old: str, new: str) -> Path:
    """A copy of megatron-core with one text replaced in one file."""
    copy = tmp_path / "tree"
    shutil.copytree(tree / "megatron", copy / "megatron")
    text = (copy / file).read_text()
    assert old in text, f"{old!r} is no longer in {file}"
    (copy / file).write_text(text.replace(old, new))
    return copy


@pytest.mark.parametrize("file", [OPTIMIZER, DISTRIBUTED])
def test_install_at_the_top_of_a_module_of_megatron(tmp_path: Path, file: str) -> None:
    tree = changed(
        fetch("0.16.1"),
        tmp_path,
        file,
        "import logging\n",
        "import vime_optim; vime_optim.install()\nimport logging\n",
    )
    answer = json.loads(
        run_script(
            tree,
            STATES
            + """
load_megatron()
assert vime_optim.status().installed
inside, at_once = states(), patched()
vime_optim.uninstall()
left = patched()
vime_optim.install()
print(json.dumps([inside, at_once, left, states(), patched()]))
""",
        )
    )
    inside, at_once, left, after, later = answer
    assert left == []
    assert inside == after
    assert at_once == later
    assert "not understood" not in inside.values()


def test_a_fix_is_off_as_a_whole_also_when_that_is_found_late(tmp_path: Path) -> None:
    """gather-free: patched when the optimizer is imported, unclear when the strategies are."""
    tree = changed(
        fetch("0.16.1"), tmp_path, LOADER, "def apply_loading_parallelization", "def apply_another"
    )
    answer = json.loads(
        run_script(
            tree,
            STATES
            + """
vime_optim.install()
from vime_optim.simulate.megatron import prepare
prepare("te")
import megatron.core.optimizer.distrib_optimizer as module
early = applied()
cls = module.DistributedOptimizer
fixes = lambda name: " ".join(f.__vime_optim__ for f in layers(getattr(cls, name))).split()
def layers(function):
    while function is not None:
        if getattr(function, "__vime_optim__", None):
            yield function
        function = getattr(function, "__wrapped__", None)
before = fixes("state_dict")
from megatron.core.dist_checkpointing.strategies import fully_parallel
others = [fix for fix in before if fix != "gather-free"]
result = [early, applied(), states(), others == fixes("state_dict")]
vime_optim.uninstall()
print(json.dumps([*result, patched()]))
""",
        )
    )
    early, late, verdicts, others_stay, left = answer
    assert set(early) - set(late) == {"gather-free"} or "gather-free" not in early
    assert "gather-free" not in late
    assert "restore" in late
    assert verdicts["gather-free:apply_loading_parallelization"] == "not understood"
    assert verdicts["gather-free:sharded_param_state_fully_reshardable"] == "withheld"
    assert others_stay
    assert left == []


def test_rank_0_is_told_what_is_off_and_what_to_do(tmp_path: Path) -> None:
    tree = changed(
        fetch("0.16.1"), tmp_path, OPTIMIZER, "def _filter_and_reorder_param_groups", "def _reorder"
    )
    script = (
        STATES
        + """
import io
text = io.StringIO()
logging.getLogger("vime_optim").addHandler(logging.StreamHandler(text))
vime_optim.install({arguments})
try:
    load_megatron()
    error = ""
except NotUnderstoodError as problem:
    error = str(problem)
print(json.dumps([text.getvalue(), error]))
"""
    )
    told, _ = json.loads(run_script(tree, script.replace("{arguments}", ""), RANK="0"))
    assert "param-groups" in told
    assert "F24" in told
    assert "_filter_and_reorder_param_groups" in told
    assert "VIME_OPTIM_STRICT" in told
    assert told.count("param-groups") == 2, "once, with how to silence it"
    silent, _ = json.loads(run_script(tree, script.replace("{arguments}", ""), RANK="1"))
    assert "param-groups" not in silent
    skipped, error = json.loads(
        run_script(tree, script.replace("{arguments}", ""), VIME_OPTIM_SKIP="param-groups")
    )
    assert "off as a whole" not in skipped
    assert error == ""
    _, error = json.loads(run_script(tree, script.replace("{arguments}", "strict=True")))
    assert "param-groups" in error

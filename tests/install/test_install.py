"""install(), uninstall(), status() on the real megatron-core, each case in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from vime_optim.tools.megatron_source import fetch

ROOT = Path(__file__).parents[2]

PRELUDE = """
import json, sys, warnings
warnings.simplefilter("ignore")
import vime_optim
from vime_optim.errors import *

def load_megatron():
    from vime_optim.simulate.megatron import prepare
    prepare("te")
    from megatron.core import dist_checkpointing
    from megatron.core.optimizer import distrib_optimizer, optimizer
    from megatron.core.optimizer.cpu_offloading import hybrid_optimizer

def patched():
    found = []
    for name, module in list(sys.modules.items()):
        if not name.startswith("megatron"):
            continue
        for key, value in list(vars(module).items()):
            if getattr(value, "__vime_optim__", None):
                found.append(f"{name}.{key}")
            if isinstance(value, type):
                for attribute, raw in list(vars(value).items()):
                    if getattr(getattr(raw, "__func__", raw), "__vime_optim__", None):
                        found.append(f"{name}.{key}.{attribute}")
    return sorted(found)
"""


def run_script(tree: Path, script: str, **env: str) -> str:
    """Run a script with `tree` as its megatron-core; returns its last line of output."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(script)],
        env={
            **os.environ,
            "PYTHONPATH": f"{tree}:{ROOT}",
            "OMP_NUM_THREADS": "1",
            **env,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize("release", ["0.15.3", "0.19.2"])
def test_before_and_after_import_and_exact_undo(release: str) -> None:
    lines = json.loads(
        run_script(
            fetch(release),
            """
            assert "torch" not in sys.modules and "megatron" not in sys.modules
            vime_optim.install()
            load_megatron()
            before = patched()
            first = vime_optim.install()
            assert patched() == before, "a second install changes something"
            vime_optim.uninstall()
            left = patched()
            vime_optim.uninstall()
            vime_optim.install()
            after = patched()
            report = vime_optim.status()
            states = {row.target: row.verdict for row in report.rows}
            text = str(report)
            print(json.dumps({"before": before, "left": left, "after": after, "states": states,
                              "installed": report.installed, "text": text}))
            """,
        )
    )
    assert lines["left"] == []
    assert lines["before"] == lines["after"]
    assert "megatron.core.dist_checkpointing.load" in lines["before"], "an alias was missed"
    assert lines["installed"]
    assert "not understood" not in lines["states"].values()
    assert "gather-free" in lines["text"]
    assert max(map(len, lines["text"].splitlines())) <= 80
    order = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer.HybridDeviceOptimizer"
    verdict = lines["states"][f"{order}._register_param_copy_back_gpu_hook"]
    assert verdict == ("needed" if release == "0.15.3" else "fixed upstream")


def test_conflicts_leave_nothing_half_applied(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign_patch.py"
    foreign.write_text(
        "import functools\n"
        "def patch(cls, name):\n"
        "    original = getattr(cls, name)\n"
        "    @functools.wraps(original)\n"
        "    def replacement(*args, **kwargs):\n"
        "        return original(*args, **kwargs)\n"
        "    setattr(cls, name, replacement)\n"
    )
    answer = json.loads(
        run_script(
            fetch("0.16.1"),
            f"""
            sys.path.insert(0, {str(tmp_path)!r})
            load_megatron()
            from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
            import foreign_patch
            own = DistributedOptimizer.load_state_dict
            foreign_patch.patch(DistributedOptimizer, "load_state_dict")
            try:
                vime_optim.install()
                print(json.dumps("no error"))
            except ConflictError as error:
                first = str(error)
                left = patched()
                DistributedOptimizer.load_state_dict = own
                vime_optim.install()
                foreign_patch.patch(DistributedOptimizer, "state_dict")
                count = len(patched())
                try:
                    vime_optim.uninstall()
                    second = "no error"
                except ConflictError as error:
                    second = str(error)
                print(json.dumps([first, left, second, count == len(patched())]))
            """,
        )
    )
    first, left, second, untouched = answer
    assert "load_state_dict" in first
    assert "foreign_patch.py" in first
    assert "VIME_OPTIM_SKIP" in first
    assert left == []
    assert "state_dict" in second
    assert untouched


SKYRL = "skyrl.backends.skyrl_train.distributed.megatron.megatron_strategy"


@pytest.mark.parametrize("first", ["install", "framework"])
def test_a_known_workaround_gives_way_and_is_given_back(tmp_path: Path, first: str) -> None:
    """As SkyRL does it at import; the same override by anybody else is shown, and no undo."""
    path = tmp_path.joinpath(*SKYRL.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True)
    path.write_text(
        "from megatron.core.optimizer.cpu_offloading import hybrid_optimizer\n"
        "def _patched_update_fp32_params_by_new_state(self):\n"
        "    raise AssertionError('the workaround ran')\n"
        "hybrid_optimizer.HybridDeviceOptimizer._update_fp32_params_by_new_state = (\n"
        "    _patched_update_fp32_params_by_new_state)\n"
    )
    answer = json.loads(
        run_script(
            fetch("0.16.1"),
            f"""
            import importlib
            sys.path.insert(0, {str(tmp_path)!r})
            load_megatron()
            from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import (
                HybridDeviceOptimizer as Hybrid)
            name = "_update_fp32_params_by_new_state"
            steps = [vime_optim.install, lambda: importlib.import_module({SKYRL!r})]
            for step in steps if {first == "install"} else reversed(steps):
                step()
            theirs = getattr(sys.modules[{SKYRL!r}], "_patched" + name)
            ours = vars(Hybrid)[name]
            applied = ours is not theirs and ours.__vime_optim__ == "hybrid-restore"
            quiet = [row.target for row in vime_optim.status().rows if row.laid_over]
            vime_optim.install()
            vime_optim.uninstall()
            given_back = vars(Hybrid)[name] is theirs
            vime_optim.install()

            def somebody_elses(self):
                pass

            setattr(Hybrid, name, somebody_elses)
            report = vime_optim.status()
            shown = [[row.target, row.laid_over] for row in report.rows if row.laid_over]
            try:
                vime_optim.uninstall()
                refused = ""
            except ConflictError as error:
                refused = str(error)
            print(json.dumps([applied, quiet, given_back, shown, refused, str(report)]))
            """,
        )
    )
    applied, quiet, given_back, shown, refused, text = answer
    assert applied
    assert quiet == []
    assert given_back
    [[target, what]] = shown
    assert target.endswith("HybridDeviceOptimizer._update_fp32_params_by_new_state")
    assert "somebody_elses" in what
    assert "somebody_elses" in refused
    assert "patched over by __main__.somebody_elses" in text


def test_selection_strictness_and_bad_ids() -> None:
    answer = json.loads(
        run_script(
            fetch("0.16.1"),
            """
            answers = []
            for arguments in ({"skip": "F99"}, {"sharding": "maybe"}, {"colour": 1}):
                try:
                    vime_optim.install(**arguments)
                    answers.append("no error")
                except VimeOptimError as error:
                    answers.append(type(error).__name__)
            load_megatron()
            from megatron.core.optimizer import distrib_optimizer
            kept = distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states
            def strange(self):
                pass
            strange.__code__ = strange.__code__.replace(
                co_filename=distrib_optimizer.__file__)
            distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states = strange
            try:
                vime_optim.install(strict=True)
                answers.append("no error")
            except NotUnderstoodError as error:
                answers.append(type(error).__name__)
            answers.append(patched())
            report = vime_optim.install(skip="gather-free,F17")
            answers.append({row.target.split(".")[-1]: [row.verdict, row.applied]
                            for row in report.rows})
            print(json.dumps(answers))
            """,
            VIME_OPTIM_SKIP="",
        )
    )
    assert answer[:5] == [
        "InstallError",
        "SettingsError",
        "SettingsError",
        "NotUnderstoodError",
        [],
    ]
    states = answer[5]
    assert states["_set_main_param_and_optimizer_states"] == ["not understood", False]
    assert states["sharded_param_state_fully_reshardable"] == ["skipped", False]
    assert states["state_dict"] == ["needed", True]


def test_a_source_checkout_and_an_old_megatron(tmp_path: Path) -> None:
    checkout = tmp_path / "Megatron-LM"
    shutil.copytree(fetch("0.16.1") / "megatron", checkout / "megatron")
    answer = run_script(
        checkout, "vime_optim.install()\nload_megatron()\nprint(vime_optim.status().megatron)"
    )
    assert answer == "megatron-core 0.16.1 (source)"
    info = checkout / "megatron/core/package_info.py"
    info.write_text(info.read_text().replace("MINOR = 16", "MINOR = 14"))
    answer = run_script(
        checkout,
        """
        try:
            vime_optim.install()
        except InstallError as error:
            print(json.dumps([str(error), vime_optim.status().installed]))
        """,
    )
    text, installed = json.loads(answer)
    assert "0.14" in text
    assert "too old" in text
    assert not installed

"""The ways in for frameworks, called as the frameworks call them, on the real megatron-core."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from vime_optim import run as run_module
from vime_optim.errors import SettingsError
from vime_optim.tools.megatron_source import fetch

ROOT = Path(__file__).parents[2]

#: What every scenario asks at its end.
STATE = """
import json, sys, warnings
warnings.simplefilter("ignore")
def state():
    import vime_optim
    from vime_optim.simulate.megatron import prepare
    prepare("te")
    from megatron.core.optimizer import distrib_optimizer
    report = vime_optim.status()
    return {
        "installed": report.installed,
        "applied": sorted({row.fix for row in report.rows if row.applied}),
        "patched": hasattr(distrib_optimizer.DistributedOptimizer.state_dict, "__vime_optim__"),
    }
"""


def run(command: list[str], *path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (*path, fetch("0.16.1"), ROOT))),
            "OMP_NUM_THREADS": "1",
            **env,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def is_in_force(state: dict[str, object]) -> bool:
    return bool(state["installed"] and state["patched"] and "step" in state["applied"])  # type: ignore[operator]


def test_names_in_configurations(tmp_path: Path) -> None:
    """slime and vime: a function by its path, called with the arguments once Megatron is set up.
    verl: names of modules in a variable. ms-swift: a file, imported by its stem."""
    plugin = tmp_path / "exact_resume.py"
    plugin.write_text("import vime_optim.auto\n")
    script = f"""
        import argparse, importlib, os
        from vime_optim.simulate.megatron import prepare
        prepare("te")
        import torch
        from megatron.core import parallel_state
        from megatron.core.optimizer import distrib_optimizer
        import vime_optim

        def fresh():
            vime_optim.uninstall()
            sys.modules.pop("vime_optim.auto", None)

        os.environ |= {{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}}
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        args = argparse.Namespace(custom_megatron_init_path="vime_optim.hooks.slime_init", rank=0)
        before = dict(vars(args))
        module, _, name = args.custom_megatron_init_path.rpartition(".")
        answer = getattr(importlib.import_module(module), name)(args)
        slime = state() | {{"untouched": vars(args) == before and answer is None}}
        fresh()

        for name in os.environ["VERL_USE_EXTERNAL_MODULES"].split(","):
            importlib.import_module(name)
        verl = state()
        fresh()

        folder, file = os.path.split({str(plugin)!r})
        sys.path.insert(0, folder)
        importlib.import_module(file.split(".", 1)[0])
        swift = state()
        print(json.dumps([slime, verl, swift]))
    """
    command = [sys.executable, "-c", STATE + textwrap.dedent(script)]
    done = run(command, VERL_USE_EXTERNAL_MODULES="vime_optim.auto")
    slime, verl, swift = json.loads(done.stdout.splitlines()[-1])
    assert all(map(is_in_force, (slime, verl, swift))), (slime, verl, swift)
    assert slime["untouched"]


def test_sitecustomize_waits_for_megatron(tmp_path: Path) -> None:
    """Every Python of an environment runs it, so it must cost nothing until Megatron comes."""
    hook = "import vime_optim.hooks\nvime_optim.hooks.on_megatron_import()\n"
    (tmp_path / "sitecustomize.py").write_text(hook)
    (tmp_path / "hook.pth").write_text(hook.replace("\n", "; "))
    script = f"""
        import site
        site.addsitedir({str(tmp_path)!r})  # as a .pth file in site-packages; twice does no harm
        heavy = sorted({{"torch", "megatron", "vime_optim.fixes"}} & set(sys.modules))
        import megatron.core
        import vime_optim
        early = vime_optim.status().installed
        print(json.dumps([heavy, early, state()]))
    """
    done = run([sys.executable, "-c", STATE + textwrap.dedent(script)], tmp_path)
    heavy, early, state = json.loads(done.stdout.splitlines()[-1])
    assert heavy == []
    assert early
    assert is_in_force(state)


def test_torchrun_runs_an_untouched_script(tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "beside.py").write_text("value = 7\n")
    (folder / "train.py").write_text(
        STATE
        + textwrap.dedent(
            """
            import multiprocessing, os
            import beside

            def child(queue):
                queue.put([__name__, beside.value])

            if __name__ == "__main__":
                context = multiprocessing.get_context("spawn")
                queue = context.Queue()
                process = context.Process(target=child, args=(queue,))
                process.start()
                answer = {"argv": sys.argv, "rank": os.environ["RANK"]}
                answer["child"] = queue.get(timeout=120)
                process.join()
                with open(sys.argv[1], "w") as file:
                    json.dump(answer | {"state": state()}, file)
            """
        )
    )
    out = tmp_path / "out.json"
    script = os.path.join("elsewhere", "train.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
    command += ["--master-addr", "127.0.0.1", "--master-port", "0"]
    command += ["-m", "vime_optim.run", script, str(out), "--lr", "1e-4"]
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        run(command)
    finally:
        os.chdir(before)
    answer = json.loads(out.read_text())
    assert answer["argv"] == [script, str(out), "--lr", "1e-4"]
    assert answer["rank"] == "0"
    assert answer["child"] == ["__mp_main__", 7]
    assert is_in_force(answer["state"])


def test_run_refuses_what_it_cannot_run(tmp_path: Path) -> None:
    for words in ([], ["--help"], ["-m"]):
        with pytest.raises(SettingsError, match="no script to run"):
            run_module.parse(words)
    with pytest.raises(SettingsError, match="not there"):
        run_module.parse([str(tmp_path / "train.py"), "--lr", "1"])
    assert run_module.parse(["-m", "a.b", "-m", "x"]) == (True, ["a.b", "-m", "x"])

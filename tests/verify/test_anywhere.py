"""verify and doctor on any machine: a CUDA torch without a GPU, a cache of the user's, progress."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from vime_optim.simulate.bootstrap import bootstrap_env, without_gpu
from vime_optim.tools import doctor, megatron_source
from vime_optim.verify import command

ROOT = Path(__file__).parents[2]

ASKS_THE_GPUS = "from torch.utils.cpp_extension import _get_cuda_arch_flags as ask; print(ask())"


def test_extensions_do_not_ask_gpus_that_are_not_there() -> None:
    """What Megatron's compiled modules run when they are imported, as torch's own function."""
    env = {k: v for k, v in os.environ.items() if k != "TORCH_CUDA_ARCH_LIST"}
    env["CUDA_VISIBLE_DEVICES"] = ""

    def ask(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        ask_torch = [sys.executable, "-c", ASKS_THE_GPUS]
        return subprocess.run(
            ask_torch, env=environment, capture_output=True, text=True, check=False
        )

    before = ask(env)
    assert before.returncode != 0
    assert "Error" in before.stderr
    assert ask(without_gpu(env)).returncode == 0
    assert "TORCH_CUDA_ARCH_LIST" in bootstrap_env(env)
    assert bootstrap_env({**env, "TORCH_CUDA_ARCH_LIST": "8.0"})["TORCH_CUDA_ARCH_LIST"] == "8.0"


def test_doctor_gives_its_probe_an_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = tmp_path / "megatron" / "core" / "__init__.py"
    core.parent.mkdir(parents=True)
    core.write_text(ASKS_THE_GPUS)  # a megatron-core that asks as those with extensions do
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    answer = doctor._probe(tmp_path)
    assert "IndexError" not in str(answer)
    assert "max()" not in str(answer)


def test_what_can_be_made_again_is_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VIME_OPTIM_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert megatron_source.cache_dir() == tmp_path / "vime_optim" / "megatron"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert megatron_source.cache_dir() == tmp_path / ".cache" / "vime_optim" / "megatron"
    assert not command.DEFAULT_DIR.is_relative_to(ROOT)


def test_a_download_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VIME_OPTIM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(megatron_source, "_download", lambda release, folder: folder / "x.whl")
    monkeypatch.setattr(megatron_source, "_unpack_into", lambda wheel, target: target)
    megatron_source.fetch("0.16.1")
    output = capsys.readouterr()
    assert output.err == f"downloading megatron-core 0.16.1 to {tmp_path / '0.16.1'}\n"
    assert output.out == ""


SHOWS = """
from vime_optim.tools.progress import activity
with activity("importing") as tell:
    tell("training and saving")
print("done")
"""


def test_progress_is_for_a_terminal_alone() -> None:
    done = subprocess.run([sys.executable, "-c", SHOWS], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("done\n", "")
    leader, follower = pty.openpty()
    env = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, "-c", SHOWS], stdout=subprocess.PIPE, stderr=follower, env=env
    ) as process:
        process.wait(timeout=120)
        os.close(follower)
        shown = os.read(leader, 65536).decode()
    os.close(leader)
    assert "training and saving" in shown

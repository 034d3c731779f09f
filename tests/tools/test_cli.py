"""The command line: its commands and flags are an interface, and stay as they are."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from vime_optim import cli
from vime_optim.verify import command

#: What scripts look for, in full: the package's own constant would equal itself.
OK_LINE = "CKPT verify OK: save + load succeeded."

Main = Callable[..., int]

COMMANDS = {
    *("verify", "plan", "inspect", "check", "diff", "repair", "export", "import", "status"),
    *("doctor", "patches"),
}

VERIFY_FLAGS = {
    *("--phase", "--dir", "--megatron", "--device", "--stock", "--json", "--timeout"),
    "--launcher",
    *("--num-steps", "--more-steps", "--save-interval", "--ckpt-step", "--async", "--via-training"),
    *("--optimizer", "--no-offload", "--offload-fraction", "--no-pao", "--exp-avg-dtype"),
    *("--exp-avg-sq-dtype", "--no-remainders", "--sharding"),
    *("--nproc", "--load-nproc", "--tp", "--pp", "--ep", "--load-tp", "--load-pp", "--load-ep"),
    *("--moe", "--tied", "--one-bucket", "--seed"),
}


def test_commands() -> None:
    assert set(cli.COMMANDS) == COMMANDS
    parser, _ = cli.build_parser(None)
    help_text = parser.format_help()
    assert all(name in help_text for name in COMMANDS)


def test_flags_of_verify() -> None:
    _, runners = cli.build_parser("verify")
    assert set(runners) == {"verify"}
    parser = cli.argparse.ArgumentParser()
    command.add_verify_arguments(parser)
    assert {option for option in parser._option_string_actions if option[1] == "-"} == (
        VERIFY_FLAGS | {"--help"}
    )


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([name, "--help"])
    assert end.value.code == 0
    assert f"vime-optim {name}" in capsys.readouterr().out


def test_help_loads_neither_torch_nor_rich() -> None:
    script = (
        "import sys; from vime_optim.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'rich', 'megatron'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_no_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "COMMAND" in capsys.readouterr().out


@pytest.fixture
def verify(
    launchers: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run `vime-optim verify` on the session's template; (exit status, output, errors)."""

    @contextmanager
    def shared(megatron: str, device: str) -> Any:
        assert device == "cpu"
        yield launchers.get(megatron)

    monkeypatch.setattr(command, "open_launcher", shared)

    def run(*flags: str, directory: Path) -> tuple[int, str, str]:
        arguments = ["verify", "--megatron", "0.16.1", "--dir", str(directory), *flags]
        status = cli.main(arguments)
        output = capsys.readouterr()
        return status, output.out, output.err

    return run


def test_verify_saves_in_one_launch_and_loads_in_another(verify: Any, tmp_path: Path) -> None:
    steps = ("--num-steps", "3", "--save-interval", "1", "--more-steps", "1")
    status, output, _ = verify("--phase", "save", *steps, directory=tmp_path)
    assert status == 0, output
    assert OK_LINE not in output
    assert {path.name for path in tmp_path.glob("iter_*")} == {
        "iter_0000001",
        "iter_0000002",
        "iter_0000003",
    }
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"

    status, output, _ = verify("--phase", "load", directory=tmp_path)
    assert (status, output.splitlines()[-1]) == (0, OK_LINE)

    flags = ("--phase", "load", "--ckpt-step", "2", "--load-nproc", "3", "--json")
    status, output, _ = verify(*flags, directory=tmp_path)
    report = json.loads(output)
    assert (status, report["exact"], report["sound"]) == (0, True, True)
    assert {stage["name"] for stage in report["stages"]} == {"loaded", "resumed"}

    status, _, errors = verify("--phase", "load", "--ckpt-step", "7", directory=tmp_path)
    assert status == 2
    assert "no checkpoint of step 7" in errors

    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("iter_*/*")}
    status, _, errors = verify("--phase", "load", "--tied", directory=tmp_path)
    assert status == 2
    assert "another model" in errors or "do not fit" in errors
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("iter_*/*")} == before


def test_verify_stock_fails_and_says_why(verify: Any, tmp_path: Path) -> None:
    status, output, _ = verify("--stock", "--one-bucket", directory=tmp_path)

    assert status == 1
    assert "this looks like F9" in output
    assert output.splitlines()[-1].startswith("CKPT verify FAILED (stock megatron-core)")


def test_verify_refuses_before_it_touches_anything(verify: Any, tmp_path: Path) -> None:
    status, _, errors = verify("--phase", "load", directory=tmp_path / "nowhere")
    assert status == 2
    assert "no checkpoint to load" in errors
    assert not (tmp_path / "nowhere").exists()

    (tmp_path / "iter_0000009").mkdir()
    (tmp_path / "iter_0000009" / "precious").touch()
    status, _, errors = verify(directory=tmp_path)
    assert status == 2
    assert "did not write" in errors
    assert (tmp_path / "iter_0000009" / "precious").exists()

    status, _, errors = verify("--nproc", "3", "--tp", "2", directory=tmp_path / "new")
    assert status == 2
    assert "cannot be divided" in errors

    status, _, errors = verify("--ckpt-step", "2", directory=tmp_path / "new")
    assert status == 2
    assert "no checkpoint will be saved after step 2" in errors
    assert not (tmp_path / "new").exists()


def test_verify_refuses_a_directory_in_use(verify: Any, tmp_path: Path) -> None:
    from vime_optim.verify.directory import locked

    script = "import sys, pathlib; from vime_optim.verify.directory import locked\n"
    script += "with locked(pathlib.Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    status, _, errors = verify(directory=tmp_path)
    holder.communicate("")

    assert status == 2
    assert "another verify job" in errors
    assert not list(tmp_path.glob("iter_*"))
    with locked(tmp_path):
        pass


def test_status_shows_every_fix(capsys: pytest.CaptureFixture[str]) -> None:
    from vime_optim.fixes import FIXES

    done = subprocess.run(
        [sys.executable, "-m", "vime_optim.cli", "status", "--megatron", "0.16.1", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    report = json.loads(done.stdout)
    assert {row["fix"] for row in report["rows"]} == {fix.id for fix in FIXES}
    # The modules of this megatron-core were imported and looked at.
    assert all(row["applied"] for row in report["rows"] if row["fix"] == "step")

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vime_optim.errors import VerifyError
from vime_optim.verify.directory import LOCK_NAME, locked

_HOLD = "import sys, pathlib; from vime_optim.verify.directory import locked\n"
_HOLD += "with locked(pathlib.Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"


def test_a_second_process_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"

    with pytest.raises(VerifyError, match=f"held by process {holder.pid}"), locked(tmp_path):
        pass

    holder.kill()  # a lock must not outlive its holder, even one that could not clean up
    holder.communicate()
    with locked(tmp_path):
        assert (tmp_path / LOCK_NAME).is_file()


def test_it_can_be_taken_again(tmp_path: Path) -> None:
    for _ in range(2):
        with locked(tmp_path):
            pass

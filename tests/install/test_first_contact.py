"""What a new user is told: one line a job, a report that reads well, and no success where
nothing was patched. Each scenario is a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

from vime_optim import __version__
from vime_optim.tools.megatron_source import fetch

ROOT = Path(__file__).parents[2]


def run(
    script: str, *, path: tuple[Path, ...] = (), **env: str
) -> subprocess.CompletedProcess[str]:
    base = {key: text for key, text in os.environ.items() if key != "RANK"}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**base, "PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT))), **env},
        capture_output=True,
        text=True,
        check=False,
    )


def test_one_line_on_rank_0_and_none_on_the_others() -> None:
    done = run(
        """
        import io, json, logging, os
        import vime_optim
        heard = io.StringIO()
        form = "%(name)s %(levelname)s %(message)s"
        logging.basicConfig(stream=heard, level=logging.INFO, format=form)

        def install(**arguments):
            heard.seek(0); heard.truncate()
            report = vime_optim.install(**arguments)
            line, shown, table = heard.getvalue(), repr(report), str(report)
            vime_optim.uninstall()
            return [line, shown, table]

        first = install()
        skipped = install(skip="step,F15", sharding="off")
        verbose = install(verbose=True)  # the program's own logging is not doubled
        os.environ["RANK"] = "1"
        other = install()
        del os.environ["RANK"]
        os.environ["SLURM_PROCID"] = "3"
        slurm = install()
        print(json.dumps([first, skipped, verbose, other, slurm]))
        """,
        path=(fetch("0.19.2"),),
    )
    assert done.returncode == 0, done.stderr
    first, skipped, verbose, other, slurm = json.loads(done.stdout.splitlines()[-1])

    from vime_optim.fixes import FIXES

    start = f"vime_optim {__version__}: {len(FIXES)} fixes on megatron-core 0.19.2"
    assert first[0] == f"vime_optim INFO {start}; fully_reshardable enforced\n"
    assert verbose[0] == first[0]
    assert first[1] == f"<{start}, installed; print() shows the table>"
    assert len(first[2].splitlines()) > len(FIXES)
    assert f": {len(FIXES) - 2} fixes on" in skipped[0]
    assert "(skipped: step, inert-state)" in skipped[0]
    assert skipped[0].endswith("; sharding as the job asks\n")
    assert (other[0], slurm[0]) == ("", "")


def test_nothing_to_patch_is_a_warning_and_no_success(tmp_path: Path) -> None:
    script = "import vime_optim; vime_optim.install()"
    done = run(script)
    assert done.returncode == 0
    assert "megatron-core is not found" in done.stderr
    assert "vime-optim doctor" in done.stderr
    assert run(script, RANK="1").stderr == ""

    main = [sys.executable, "-m", "vime_optim", "status"]
    done = subprocess.run(main, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "megatron-core not found" in done.stdout
    assert "--megatron" in done.stderr
    assert "Traceback" not in done.stderr


def test_verbose_speaks_where_no_logging_is_set_up() -> None:
    script = """
    import logging, vime_optim
    vime_optim.install()
    vime_optim.uninstall()
    assert not logging.getLogger("vime_optim").handlers
    """
    done = run(script, path=(fetch("0.19.2"),), VIME_OPTIM_VERBOSE="1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(f"vime_optim {__version__}: ") == 1


def test_names_in_the_table_are_whole_beside_long_cells() -> None:
    from vime_optim.fixes import FIXES
    from vime_optim.report import Report, Row

    verdicts = ("needed", "fixed upstream", "not understood", "absent", "skipped")
    rows = tuple(
        Row(fix.id, fix.faults, f"{fix.id}.{verdict}", verdict, verdict == "needed", 12345)
        for fix in FIXES
        for verdict in verdicts
    )
    text = str(Report(True, "0", "megatron-core 0.16.1", rows, {}))
    assert max(map(len, text.splitlines())) <= 80
    for fix in FIXES:
        assert f"│ {fix.id} " in text
        assert all(fault in text for fault in fix.faults)
    assert "12345" in text
    assert "…" not in text

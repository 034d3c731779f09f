"""Broken machines in numbers: `python -m tests.writer.points --megatron 0.16.1 --kill 100 ...`.

One process imports megatron-core and forks two ranks for each point, which takes a second or two.
Afterwards a directory is exact (chunk by chunk what one job saved), refused by the load check, or
wrong; and everything beside it is as it was. Faults of the file system come from a library that is
preloaded (`faults.c`), at a random call on a file of the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.writer.launch import ROOT, tree_of

LIMIT_S = 300.0
BAD = ("WRONG", "HUNG", "LOST", "TOUCHED", "ONE RANK")
"""Words of outcomes that must not be."""

Point = Callable[[Path, random.Random], str]


class Job:
    """Two ranks that save once and say how it ended."""

    def __init__(self, root: Path, tag: str, kind: str, environment: dict[str, str] | None = None):
        self.root, self.tag = root, tag
        self.folder = Path(tempfile.mkdtemp(prefix=f"{tag}_", dir=root.parent))
        self.pids = []
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                os.environ.update(environment or {})
                _rank(self, rank, kind)
            self.pids.append(pid)

    def family(self, rank: int) -> list[int]:
        """A rank and the processes that it started."""
        try:
            process = psutil.Process(self.pids[rank])
            return [process.pid, *(child.pid for child in process.children(recursive=True))]
        except psutil.NoSuchProcess:
            return []

    def signal(self, number: int, ranks: tuple[int, ...] = (0, 1)) -> list[int]:
        reached = [pid for rank in ranks for pid in self.family(rank)]
        for pid in reached:
            _kill(pid, number)
        return reached

    def wait(self, limit_s: float = LIMIT_S) -> bool:
        """Whether all ranks ended in time; those that did not are killed."""
        end = time.monotonic() + limit_s
        left = list(self.pids)
        while left and time.monotonic() < end:
            left = [pid for pid in left if not _is_over(pid)]
            time.sleep(0.01)
        for pid in left:
            _kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return not left

    def ends(self) -> list[str]:
        """What each rank raised ("" for nothing, "killed" when it left no word)."""
        paths = [self.folder / f"end{rank}" for rank in range(2)]
        return [path.read_text() if path.exists() else "killed" for path in paths]


_over: set[int] = set()


def _is_over(pid: int) -> bool:
    if pid not in _over and os.waitpid(pid, os.WNOHANG)[0] == pid:
        _over.add(pid)
    return pid in _over


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _rank(job: Job, rank: int, kind: str) -> None:
    """What a rank does: one save of `kind` (sync, forked, persistent); never returns."""
    import torch

    log = os.open(job.folder / f"log{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    end = "died"
    try:
        os.environ["RANK"] = str(rank)
        torch.set_num_threads(1)
        store = torch.distributed.FileStore(str(job.folder / "store"), 2)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
        end = _flat(job, kind) if kind.startswith("flat") else ""
        if not kind.startswith("flat"):
            _save(job, rank, kind)
    except BaseException as error:
        end = f"{type(error).__name__}: {error}"
    finally:
        part = job.folder / f"end{rank}.part"
        part.write_text(end)
        part.rename(job.folder / f"end{rank}")
        os._exit(0)


def _save(job: Job, rank: int, kind: str) -> None:
    import torch

    from tests.writer.readback import snapshot
    from tests.writer.scenarios import Trainer

    torch.use_deterministic_algorithms(True, warn_only=True)
    trainer = Trainer(1 << 17, persistent=kind == "persistent")
    trainer.iteration = sum(job.tag.encode())  # gradients, and so values, of each job's own
    trainer.step()
    trainer.iteration = 1
    truth = job.root.parent / f"truth_{job.tag}_{rank}.pt"
    torch.save(snapshot(trainer.state()), truth)
    (job.folder / f"began{rank}").touch()
    trainer.save(job.root, is_async=kind != "sync")
    trainer.finalize()
    (job.folder / f"done{rank}").touch()


def _flat(job: Job, kind: str) -> str:
    from tests.writer.failures import flat

    _, how, rounds = kind.split()
    return json.dumps(flat(job.root, how == "persistent", int(rounds))["held"])


def judge(root: Path, tags: tuple[str, ...]) -> str:
    """In a process of its own: exact (with the job's tag), refused, absent or WRONG."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        answer = "WRONG: the judge died"
        try:
            answer = _judge(root, tags)
        finally:
            os.write(write, answer.encode())
            os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with os.fdopen(read) as file:
        return file.read()


def _judge(root: Path, tags: tuple[str, ...]) -> str:
    import torch

    from tests.writer.readback import differences
    from vime_optim.commit.load_check import look

    folders = sorted(root.glob("iter_*"))
    if not folders:
        return "absent"
    if look(str(folders[0]))[0] is not None or not (folders[0] / "metadata.json").exists():
        return "refused"
    for tag in tags:
        truths = sorted(root.parent.glob(f"truth_{tag}_*.pt"))
        if len(truths) == 2 and not any(
            differences(folders[0], torch.load(path, weights_only=True)) for path in truths
        ):
            return f"exact {tag}"
    return "WRONG"


def _began(job: Job, draw: random.Random, most_s: float) -> None:
    """Wait until a save begins on both ranks, and then a random while."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end and not all(map(_is_over, job.pids)):
        if all((job.folder / f"began{rank}").exists() for rank in range(2)):
            break
        time.sleep(0.001)
    time.sleep(draw.uniform(0, most_s))


def _kind(draw: random.Random) -> str:
    return draw.choice(["sync", "forked", "forked", "persistent"])


def kill(root: Path, draw: random.Random) -> str:
    """All ranks and their writers are killed at a random moment."""
    job = Job(root, "a", _kind(draw))
    _began(job, draw, 0.4)
    job.signal(signal.SIGKILL)
    return judge(root, ("a",)) if job.wait() else "HUNG"


def pause(root: Path, draw: random.Random) -> str:
    """A rank with its writer is stopped, the job ends, another saves the same; then it wakes."""
    first = Job(root, "a", _kind(draw))
    _began(first, draw, 0.4)
    stopped = draw.randrange(2)
    asleep = first.signal(signal.SIGSTOP, (stopped,))
    first.signal(signal.SIGKILL, (1 - stopped,))
    second = Job(root, "b", _kind(draw))
    if not second.wait():
        return "HUNG"
    before = judge(root, ("a", "b"))
    for pid in asleep:
        _kill(pid, signal.SIGCONT)
    time.sleep(draw.uniform(0.02, 1.5))
    first.signal(signal.SIGKILL, (stopped,))
    for pid in asleep:
        _kill(pid, signal.SIGKILL)
    first.wait()
    after = judge(root, ("a", "b"))
    ended = "second job done" if second.ends() == ["", ""] else "second job raised"
    lost = before.startswith("exact") and after != before
    return f"{ended}, {after}" + (" LOST" if lost else "")


def two_jobs(root: Path, draw: random.Random) -> str:
    """Two live jobs save to one directory."""
    first = Job(root, "a", _kind(draw))
    _began(first, draw, 0.2)
    second = Job(root, "b", _kind(draw))
    if not (first.wait() and second.wait()):
        return "HUNG"
    done = [job.tag for job in (first, second) if job.ends() == ["", ""]]
    found = judge(root, ("a", "b"))
    return f"{len(done)} done, {found.split()[0]}" + _unless_kept(done, found)


def _unless_kept(done: list[str], found: str) -> str:
    """Of jobs that ended well, the last one's checkpoint is there."""
    return " LOST" if done and not found.startswith("exact") else ""


def removed(root: Path, draw: random.Random) -> str:
    """The directory or one of its files is moved away, or replaced, while it is written."""
    job = Job(root, "a", _kind(draw))
    _began(job, draw, 0.2)
    folders = sorted(root.glob("iter_*"))
    over = all((job.folder / f"done{rank}").exists() for rank in range(2))
    what = draw.choice(["directory moved", "directory replaced", "file removed", "file replaced"])
    if folders:
        _interfere(folders[0], what, draw)
    if not job.wait():
        return "HUNG"
    found = judge(root, ("a",))
    ended = "done" if job.ends() == ["", ""] else "raised"
    when = "after the end" if over else "in the save" if folders else "before it"
    return f"{when}: {ended}, {found.split()[0]}"


def _interfere(folder: Path, what: str, draw: random.Random) -> None:
    try:
        if what.startswith("directory"):
            folder.rename(folder.parent.parent / "moved")
            if what == "directory replaced":
                folder.mkdir()
            return
        path = draw.choice(sorted(path for path in folder.iterdir() if path.is_file()))
        path.unlink()
        if what == "file replaced":
            path.write_bytes(b"another's")
    except (OSError, IndexError):
        pass  # the save was faster


def disk(root: Path, draw: random.Random) -> str:
    """A call on a file of the checkpoint fails, or writes less than asked for."""
    fault = draw.choice(["ENOSPC", "EIO", "SHORT"])
    number = str(draw.randrange(1, 60))
    environment = {
        "FAULT_ROOT": str(root),
        "FAULT_KIND": fault,
        "FAULT_AT": number,
        "FAULT_RANK": str(draw.randrange(2)),
    }
    job = Job(root, "a", draw.choice(["sync", "forked"]), environment)
    if not job.wait():
        return "HUNG"
    ends = job.ends()
    found = judge(root, ("a",)).split()[0]
    ended = "done" if ends == ["", ""] else "raised" if all(ends) else "ONE RANK RAISED"
    return f"{fault}: {ended}, {found}" + (" LOST" if ended == "done" and found != "exact" else "")


def flat(root: Path, draw: random.Random) -> str:
    """Fifty saves: what each rank held after a third of them, and at the end."""
    job = Job(root, "a", f"flat {draw.choice(['forked', 'persistent'])} 50")
    return "; ".join(job.ends()) if job.wait(300) else "HUNG"


POINTS: dict[str, Point] = {
    "kill": kill,
    "pause": pause,
    "two_jobs": two_jobs,
    "removed": removed,
    "disk": disk,
    "flat": flat,
}


def run_points(name: str, count: int, seed: int) -> Counter[str]:
    """Outcomes of `count` points of one kind. A sign beside the target has to stay as it is."""
    found: Counter[str] = Counter()
    for number in range(count):
        draw = random.Random(f"{name} {seed} {number}")
        with tempfile.TemporaryDirectory(prefix="vime_optim_point_") as folder:
            root = Path(folder) / "root"
            root.mkdir()
            beside = Path(folder) / "beside.distcp"
            beside.write_bytes(b"not the target's")
            outcome = POINTS[name](root, draw)
            if beside.read_bytes() != b"not the target's":
                outcome += " TOUCHED"
            if any(word in outcome for word in BAD):
                kept = Path(tempfile.gettempdir()) / f"vime_optim_bad_{name}_{seed}_{number}"
                shutil.copytree(folder, kept, dirs_exist_ok=True, symlinks=True)
                print(name, number, outcome, kept, flush=True)
        found[outcome] += 1
        if number % 10 == 9:
            print(name, number + 1, json.dumps(found), flush=True)
    return found


def build_shim(folder: Path) -> Path:
    """Compile the library of disk faults; needs a C compiler."""
    library = folder / "faults.so"
    source = Path(__file__).with_name("faults.c")
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True)
    return library


def points(counts: dict[str, int], megatron: str, seed: int = 1, limit_s: float = 3600) -> Any:
    """Run points of several kinds in one process. Outcomes by kind."""
    with tempfile.TemporaryDirectory() as folder:
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(tree_of(megatron))]),
            "OMP_NUM_THREADS": "1",
            "VIME_OPTIM_TEST_RANKS": "2",
            "LOCAL_WORLD_SIZE": "2",
            "PYTHONWARNINGS": "ignore",
        }
        if "disk" in counts:
            env["LD_PRELOAD"] = str(build_shim(Path(folder)))
        out = Path(folder) / "out.json"
        words = [sys.executable, "-m", "tests.writer.points", "--inside", json.dumps(counts)]
        subprocess.run(
            [*words, "--seed", str(seed), "--out", str(out)],
            env=env,
            cwd=ROOT,
            check=True,
            timeout=limit_s,
        )
        return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megatron", default="0.16.1")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    for name in POINTS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=0, metavar="POINTS")
    given = parser.parse_args()
    if given.inside is None:
        counts = {name: getattr(given, name) for name in POINTS if getattr(given, name)}
        print(json.dumps(points(counts, given.megatron, given.seed), indent=1))
        return
    from tests.writer import scenarios

    scenarios.prepare()
    found = {}
    for name, count in json.loads(given.inside).items():
        found[name] = dict(sorted(run_points(name, count, given.seed).items()))
        print(name, json.dumps(found[name]), flush=True)
        Path(given.out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()

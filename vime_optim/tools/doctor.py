"""`vime-optim doctor` and `status`: what is on this machine, what to do, and the fixes in force."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import vime_optim
from vime_optim import __version__, compat
from vime_optim.errors import SettingsError
from vime_optim.settings import Settings
from vime_optim.simulate.bootstrap import without_gpu
from vime_optim.tools import support

PROBE_TIMEOUT_S = 600.0

#: What no fix can mend, as it differs in the uninterrupted run itself (docs/limits.md).
NEVER_EXACT = (
    "tied embeddings over several pipeline stages with a part offloaded"
    " (0 < offload fraction < 1): two copies, two Adams"
)

#: Run in a child process: an import that hangs or crashes must not take the doctor with it.
_PROBE = """
import json
import vime_optim
from vime_optim.installer import import_targets
vime_optim.install(strict=False)
failed = import_targets()
print("\\n" + json.dumps({"rows": vime_optim.status().to_dict()["rows"], "failed": failed}))
"""


@dataclass
class DoctorReport:
    """Everything that the doctor found.

    `facts` and `fixes` are for reading; `advice` holds what to do, empty when all is well.
    """

    facts: dict[str, str] = field(default_factory=dict)
    fixes: dict[str, str] = field(default_factory=dict)
    """Fix id to what its targets were found to be."""
    advice: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        width = max(map(len, (*self.facts, *self.fixes)), default=0)
        lines = [f"{name:<{width}}  {text}" for name, text in self.facts.items()]
        if self.fixes:
            lines += ["", "fixes"]
            lines += [f"{name:<{width}}  {text}" for name, text in self.fixes.items()]
        lines += ["", "what to do"]
        lines += [f"- {text}" for text in self.advice] or ["- nothing: call vime_optim.install()"]
        return "\n".join(lines)


def examine() -> DoctorReport:
    """Look at this machine. Changes nothing; needs no GPU; never raises for what it finds."""
    found = DoctorReport()
    _machine(found)
    _torch(found)
    _packages(found)
    _settings(found)
    megatron = compat.find_megatron()
    if megatron is None:
        found.facts["megatron-core"] = "not found"
        found.advice.append(
            "put megatron-core 0.15 or newer on sys.path: a wheel, or PYTHONPATH to a checkout"
            " (--megatron looks at another one)"
        )
        return found
    found.facts["megatron-core"] = f"{megatron} in {megatron.root}"
    if megatron.version and megatron.version.release < compat.OLDEST_MEGATRON.release:
        found.advice.append(f"upgrade megatron-core to {compat.OLDEST_MEGATRON} or newer")
        return found
    found.facts["never exact"] = NEVER_EXACT
    _together(found, megatron)
    _fixes(found, megatron.root)
    return found


def _together(found: DoctorReport, megatron: compat.Megatron) -> None:
    """What of torch, Python and nvidia-resiliency-ext this megatron-core cannot work with."""
    if megatron.version is None:
        return
    versions = {name: _version(name) for name in ("torch", "nvidia-resiliency-ext")}
    torch, nvrx = (None if text == "not installed" else text for text in versions.values())
    found.advice += support.problems(
        megatron.version,
        torch=torch,
        python=sys.version_info[:2],
        has_training=(megatron.root / "megatron" / "training").is_dir(),
        nvrx=nvrx,
    )


def _machine(found: DoctorReport) -> None:
    found.facts["vime_optim"] = __version__
    found.facts["Python"] = (
        f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    )
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found.facts["host memory"] = _gib(memory_bytes)
    if Path("/dev/shm").is_dir():
        shm = shutil.disk_usage("/dev/shm")
        found.facts["/dev/shm"] = f"{_gib(shm.free)} free of {_gib(shm.total)}"
        if shm.total < memory_bytes // 4:
            found.advice.append(
                "/dev/shm is small: an async save by a persistent worker moves offloaded state"
                " there (docker run --shm-size, or VIME_OPTIM_ASYNC=stage)"
            )


def _torch(found: DoctorReport) -> None:
    try:
        import torch
    except ImportError as error:
        found.facts["torch"] = f"not importable: {error}"
        found.advice.append("install torch 2.6 or newer")
        return
    cuda = torch.version.cuda
    found.facts["torch"] = f"{torch.__version__}, {'CUDA ' + cuda if cuda else 'no CUDA'}"
    if not torch.cuda.is_available():
        found.facts["device"] = "none; `vime-optim verify` simulates one"
        found.facts["pinned memory"] = "not tried without a device"
        return
    names = Counter(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    found.facts["device"] = ", ".join(f"{count} x {name}" for name, count in names.items())
    try:
        torch.empty(1 << 20, pin_memory=True)
        found.facts["pinned memory"] = "yes"
    except RuntimeError as error:
        found.facts["pinned memory"] = f"no: {str(error).splitlines()[0]}"
        found.advice.append(
            "raise `ulimit -l` (docker run --ulimit memlock=-1): without pinned memory copies to"
            " the device are slower, not wrong"
        )


def _packages(found: DoctorReport) -> None:
    found.facts["Transformer Engine"] = compat.transformer_engine_version() or "not installed"
    apex = compat.nvidia_apex()
    found.facts["Apex"] = {
        True: "NVIDIA's",
        False: "the unrelated project of that name",
        None: "not installed",
    }[apex]
    if apex is False:
        found.advice.append(
            "`pip uninstall apex`: PyPI's apex is a web toolkit; NVIDIA's is built from source"
        )
    for name in ("nvidia-resiliency-ext", "psutil", "triton", "ray"):
        found.facts[name] = _version(name)
    if found.facts["psutil"] == "not installed":
        found.advice.append(
            "install psutil: stock writers die without it, and the save hangs (F14)"
        )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _settings(found: DoctorReport) -> None:
    known = {spec.metadata["env"] for spec in fields(Settings)}
    given = {name: text for name, text in os.environ.items() if name in known}
    found.facts["settings"] = (
        ", ".join(f"{name}={text}" for name, text in sorted(given.items())) or "defaults"
    )
    try:
        Settings.load()
    except SettingsError as error:
        found.advice.append(str(error).replace("\n", " "))


def _fixes(found: DoctorReport, root: Path) -> None:
    child = _probe(root)
    if isinstance(child, str):
        found.facts["import of megatron"] = child
        found.advice.append("megatron-core cannot be imported here: see the line above")
        return
    for module, error in child["failed"].items():
        found.facts[module] = error
        found.advice.append(f"{module} cannot be imported: its fixes stay off")
    verdicts: dict[str, Counter[str]] = {}
    for row in child["rows"]:
        text = "needed, applied" if row["applied"] else row["verdict"]
        if text not in ("absent", "not imported yet"):
            verdicts.setdefault(row["fix"], Counter())[text] += 1
        if row["verdict"] == "not understood":
            found.advice.append(
                f"fix {row['fix']} does not understand {row['target']} ({row['reason']}): report"
                f" it, and do not rely on {' '.join(row['faults'])} being mended"
            )
    for fix, counts in verdicts.items():
        found.fixes[fix] = ", ".join(
            text if len(counts) == 1 else f"{text} ({count} of {counts.total()} methods)"
            for text, count in counts.items()
        )


def _probe(root: Path) -> dict[str, Any] | str:
    """The fixes' diagnoses, or a line that says why there are none."""
    paths = [str(root), str(Path(__file__).resolve().parent.parent)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    for name in ("VIME_OPTIM_SKIP", "VIME_OPTIM_ONLY", "VIME_OPTIM_STRICT"):
        env.pop(name, None)  # what is needed does not depend on what is switched off
    if not _has_gpu():
        env = without_gpu(env)
    command = [sys.executable, "-W", "ignore", "-c", _PROBE]
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"took longer than {PROBE_TIMEOUT_S:g} s"
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return lines[-1]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.add_argument("--megatron", help="path or release (default: the one that import takes)")


add_status_arguments = add_doctor_arguments


def run_doctor(args: argparse.Namespace) -> int:
    """0 when nothing is to be done, else 1."""
    _look_at(args.megatron)
    found = examine()
    print(json.dumps(found.to_dict(), indent=2) if args.json else found)
    return 1 if found.advice else 0


def run_status(args: argparse.Namespace) -> int:
    """Install here and show the report; 1 when a module of Megatron's could not be looked at."""
    from vime_optim.installer import import_targets

    _look_at(args.megatron)
    found = compat.find_megatron() is not None
    failed: dict[str, str] = {}
    if found:
        if not _has_gpu():
            os.environ.update(without_gpu(os.environ))
        vime_optim.install()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron's, about what is not installed
            failed = import_targets()
    report = vime_optim.status()
    print(json.dumps(report.to_dict(), indent=2, default=str) if args.json else report)
    for module, error in failed.items():
        print(f"{module} cannot be imported: {error}", file=sys.stderr)
    if not found:
        print(
            "vime-optim status: megatron-core is not found. Put it on sys.path (a wheel, or"
            " PYTHONPATH to a checkout), or look at another one with --megatron.",
            file=sys.stderr,
        )
    return 0 if found and not failed else 1


def _look_at(megatron: str | None) -> None:
    """Put the megatron-core that was asked for first on the path."""
    if megatron is not None:
        from vime_optim.tools.megatron_source import resolve

        sys.path.insert(0, str(resolve(megatron)))

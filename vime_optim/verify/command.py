"""`vime-optim verify`: arguments, order of the phases, the report."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from vime_optim.compat import find_megatron
from vime_optim.errors import CheckpointError, VerifyError
from vime_optim.tools.megatron_source import resolve, user_cache
from vime_optim.tools.progress import activity
from vime_optim.verify.case import ASYNC_MODES, DTYPES, OPTIMIZERS, Backend, Case, Layout
from vime_optim.verify.directory import Workplace, find_checkpoint, locked
from vime_optim.verify.explain import explain
from vime_optim.verify.launch import LAUNCH_TIMEOUT_S, Launcher, RankFailure, open_launcher
from vime_optim.verify.runner import CaseRun, Outcome

DEFAULT_RELEASE = "0.16.1"
DEFAULT_DIR = user_cache() / "verify"
SHOWN_DIFFERENCES = 20
OK_LINE = "CKPT verify OK: save + load succeeded."

#: Errors of a rank that mean "this job cannot be run", not "it ran and is wrong".
_REFUSALS = {"ForeignCheckpointError"}


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `vime-optim verify`."""
    add = parser.add_argument
    add("--phase", choices=("all", "save", "load"), default="all", help="one launch, or both")
    add(
        "--dir",
        type=Path,
        default=DEFAULT_DIR,
        help="checkpoints (default ~/.cache/vime_optim/verify)",
    )
    add("--megatron", help=f"path or release (default: the installed one, else {DEFAULT_RELEASE})")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cpu simulates a device")
    add("--launcher", choices=("local", "ray"), default="local", help="ray: ranks are Ray actors")
    add("--stock", action="store_true", help="without vime_optim.install(), to see today's failure")
    add("--json", action="store_true", help="the report as one JSON object")
    add("--timeout", type=float, default=LAUNCH_TIMEOUT_S, metavar="S", help="seconds a launch")

    steps = parser.add_argument_group("steps")
    steps.add_argument("--num-steps", type=int, default=3, help="steps before the last save")
    steps.add_argument("--more-steps", type=int, default=2, help="steps after it")
    steps.add_argument("--save-interval", type=int, help="also save every so many steps")
    steps.add_argument("--ckpt-step", type=int, help="load this step instead of the latest")
    steps.add_argument("--async", dest="async_mode", choices=ASYNC_MODES, default="off")

    optimizer = parser.add_argument_group("optimizer")
    optimizer.add_argument("--optimizer", choices=OPTIMIZERS, default="hybrid")
    optimizer.add_argument("--no-offload", action="store_true", help="control run with FusedAdam")
    optimizer.add_argument("--offload-fraction", type=float, default=1.0)
    optimizer.add_argument("--no-pao", action="store_true", help="no precision-aware optimizer")
    optimizer.add_argument("--exp-avg-dtype", choices=DTYPES, default="fp32")
    optimizer.add_argument("--exp-avg-sq-dtype", choices=DTYPES, default="fp32")
    optimizer.add_argument("--no-remainders", action="store_true", help="whole fp32 masters")
    optimizer.add_argument(
        "--sharding",
        choices=("fully_reshardable", "dp_reshardable", "default"),
        default="fully_reshardable",
        help="what the caller asks for when saving; default: asks for nothing",
    )

    sizes = parser.add_argument_group("parallel sizes")
    sizes.add_argument("--nproc", type=int, default=2, help="ranks of a launch")
    sizes.add_argument("--load-nproc", type=int, help="ranks of the loading launch")
    for size in ("tp", "pp", "ep"):
        sizes.add_argument(f"--{size}", type=int, default=1)
        sizes.add_argument(f"--load-{size}", type=int)

    add(
        "--via-training",
        action="store_true",
        help="through megatron.training's save_checkpoint and load_checkpoint (0.17 and newer)",
    )
    model = parser.add_argument_group("model")
    model.add_argument("--moe", action="store_true", help="4 experts, top 2")
    model.add_argument("--tied", action="store_true", help="output layer shares the embedding")
    model.add_argument("--one-bucket", action="store_true", help="one gradient bucket, not several")
    model.add_argument("--seed", type=int, default=1234)


def run_verify(args: argparse.Namespace) -> int:
    """Run the asked phases; 0 when everything is exact, 1 when not.

    Raises:
        VimeOptimError: the job could not be run at all.
    """
    case = case_from_arguments(args)
    place = Workplace(args.dir)
    if args.phase == "load":
        case, step = _loading_case(case, place, args.ckpt_step)
    else:
        place.check_own()
        step = case.num_steps if args.ckpt_step is None else args.ckpt_step
        if args.phase == "all" and step not in case.save_steps:
            raise CheckpointError(
                f"no checkpoint will be saved after step {step}",
                expected=f"one of {', '.join(map(str, case.save_steps))}",
                next_step="see --num-steps and --save-interval",
            )
        place.directory.mkdir(parents=True, exist_ok=True)
    with locked(place.directory):
        outcome = _run_phases(args, case, place, step)
    _report(outcome, args)
    return 0 if _passed(outcome, args.phase) else 1


def _passed(outcome: Outcome, phase: str) -> bool:
    """A save alone need not be compared with anything; a load that was not is no success."""
    saved = phase == "save" and outcome.error is None and not outcome.differences
    return saved or outcome.exact


def case_from_arguments(args: argparse.Namespace) -> Case:
    """The case that the command line describes, the same backend on both sides."""
    backend = Backend(
        optimizer="fused" if args.no_offload and args.optimizer == "hybrid" else args.optimizer,
        offload_fraction=args.offload_fraction,
        pao=not args.no_pao and args.optimizer != "torch",
        exp_avg_dtype=args.exp_avg_dtype,
        exp_avg_sq_dtype=args.exp_avg_sq_dtype,
        remainders=not args.no_remainders,
    )
    load_sizes = {
        size: getattr(args, f"load_{size}") or getattr(args, size) for size in ("tp", "pp", "ep")
    }
    return Case(
        megatron=args.megatron or _installed() or DEFAULT_RELEASE,
        backend=backend,
        load_backend=backend,
        layout=_layout(args.nproc, args.tp, args.pp, args.ep),
        load_layout=_layout(args.load_nproc or args.nproc, **load_sizes),
        sharding=None if args.sharding == "default" else args.sharding,
        moe="sequential" if args.moe else "none",
        tied=args.tied,
        one_bucket=args.one_bucket,
        install=not args.stock,
        async_mode=args.async_mode,
        via_training=args.via_training,
        num_steps=args.num_steps,
        more_steps=args.more_steps,
        save_interval=args.save_interval,
        seed=args.seed,
    )


def _layout(nproc: int, tp: int, pp: int, ep: int) -> Layout:
    if tp < 1 or pp < 1 or nproc < 1 or nproc % (tp * pp):
        raise VerifyError(
            "the ranks cannot be divided into those parallel sizes",
            got=f"nproc={nproc}, tp={tp}, pp={pp}",
            expected="nproc a multiple of tp * pp",
        )
    return Layout(dp=nproc // (tp * pp), tp=tp, pp=pp, ep=ep)


def _installed() -> str | None:
    """The folder of the megatron-core that `import` would take."""
    found = find_megatron()
    return None if found is None else str(found.root)


def _loading_case(case: Case, place: Workplace, step: int | None) -> tuple[Case, int]:
    """The saved case with this command's loading side, and the step to load; touches nothing."""
    found = find_checkpoint(place.directory, step)
    if not place.case_file.is_file():
        raise CheckpointError(
            "the checkpoint was not saved by verify, so there is nothing to compare it with",
            where=str(place.directory),
            got="no verify/case.json",
            next_step="save with: vime-optim verify --phase save --dir DIR",
        )
    saved = Case.from_dict(json.loads(place.case_file.read_text()))
    return (
        saved.replace(
            megatron=case.megatron,
            load_backend=case.backend,
            load_layout=case.load_layout,
            moe=case.moe,
            tied=case.tied,
            install=case.install,
        ),
        found,
    )


def _run_phases(args: argparse.Namespace, case: Case, place: Workplace, step: int) -> Outcome:
    with (
        activity("importing megatron-core", not args.json) as tell,
        _launcher(case.megatron, args.device, args.launcher) as launcher,
    ):
        run = CaseRun(launcher, case, place.directory, args.timeout, tell)
        try:
            if args.phase != "load":
                place.clear()
                run.save(separate_continuous=True)
            if args.phase != "save":
                run.load(step)
        except RankFailure as failure:
            if failure.error_type in _REFUSALS:
                raise VerifyError(failure.message) from None
            run.record(failure)
        return run.outcome


def _launcher(megatron: str, device: str, kind: str) -> Launcher:
    if kind == "local":
        return open_launcher(megatron, device)
    from vime_optim.verify.ray_launch import RayLauncher

    return RayLauncher(resolve(megatron), device)


def _report(outcome: Outcome, args: argparse.Namespace) -> None:
    if args.json:
        print(json.dumps({**outcome.to_dict(), "explanation": _explanation(outcome)}, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    table = Table(title=f"vime-optim verify: {outcome.case.name}")
    for column in ("comparison", "names", "differ", "result"):
        table.add_column(column, justify="right" if column in ("names", "differ") else "left")
    for stage in outcome.stages:
        differ = len(stage.differences)
        kinds = ", ".join(f"{kind} {count}" for kind, count in stage.kinds.items())
        table.add_row(_LABELS[stage.name], str(stage.compared), str(differ), kinds or "exact")
    if outcome.stages:
        console.print(table)
    for line in _details(outcome):
        console.print(line, markup=False)
    console.print(_verdict(outcome, args.phase), markup=False)


_LABELS = {
    "saving changes nothing": "a run that saves / one that never does",
    "loaded": "right after the load / when it was saved",
    "resumed": "the resumed run / the uninterrupted one",
}


def _details(outcome: Outcome) -> list[str]:
    lines = [f"  {text}" for text in outcome.differences[:SHOWN_DIFFERENCES]]
    left = len(outcome.differences) - len(lines)
    lines += [f"  ... and {left} more (--json lists them all)"] * (left > 0)
    if outcome.error is not None:
        lines.append(
            f"  {outcome.failed_in}: {outcome.error_type}: {outcome.error.splitlines()[0]}"
        )
        frames = [line for line in (outcome.traceback or "").splitlines() if "File " in line]
        lines += frames[-1:]
    memory: dict[str, Any] = outcome.facts.get("memory", {})
    if memory:
        text = f"  restored state: {memory['held_bytes']:,} bytes held for {memory['own_bytes']:,}"
        lines.append(text + f", {len(memory['aliased'])} aliased")
    return lines + [f"  this looks like {line}" for line in _explanation(outcome)]


def _explanation(outcome: Outcome) -> list[str]:
    failed = outcome.error is not None or outcome.differences
    return explain(outcome) if failed else []


def _verdict(outcome: Outcome, phase: str) -> str:
    if _passed(outcome, phase):
        return "CKPT verify: save succeeded." if phase == "save" else OK_LINE
    what = "stock megatron-core" if not outcome.case.install else "with vime_optim"
    return f"CKPT verify FAILED ({what}): {outcome.summary()}"

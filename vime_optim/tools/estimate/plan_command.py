"""`vime-optim plan`: arguments and printing. The arithmetic is in ranks.py."""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from dataclasses import asdict, fields, replace

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from vime_optim.errors import PlanError, SettingsError
from vime_optim.tools.estimate.buffers import ParallelLayout
from vime_optim.tools.estimate.ranks import JobEstimate, RankEstimate, Spread, estimate_job
from vime_optim.tools.estimate.shapes import PRESETS, ModelShape, ModelSplit

WIDTH = 80
REQUIRED_SHAPE = ("layers", "hidden", "heads", "kv_groups", "head_dim", "ffn", "vocab")


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `vime-optim plan`."""
    model = parser.add_argument_group("model", "a preset, changed by any of the others")
    model.add_argument("--preset", choices=sorted(PRESETS), help="a known model")
    for name, text in (
        ("layers", "transformer layers"),
        ("hidden", "hidden size"),
        ("heads", "attention heads"),
        ("kv-groups", "key and value heads"),
        ("head-dim", "elements of a head"),
        ("ffn", "hidden size of the MLP, or of one expert"),
        ("vocab", "vocabulary before padding"),
        ("experts", "experts of a layer; 0 for a dense model"),
    ):
        model.add_argument(f"--{name}", type=_natural, metavar="N", help=text)
    flag = argparse.BooleanOptionalAction
    model.add_argument("--tied", action=flag, help="output layer shares the embedding")
    model.add_argument("--qk-norm", action=flag, help="queries and keys are normalised")

    layout = parser.add_argument_group("parallel layout")
    for name, default, text in (
        ("tp", 1, "tensor parallel"),
        ("pp", 1, "pipeline stages"),
        ("cp", 1, "context parallel"),
        ("ep", 1, "expert parallel"),
        ("etp", None, "expert tensor parallel (default: 1, or TP if EP=1)"),
        ("dp", None, "data parallel, without CP"),
        ("world-size", None, "ranks, instead of --dp"),
        ("last-stage-layers", None, "layers of the last pipeline stage"),
    ):
        layout.add_argument(f"--{name}", type=_natural, default=default, metavar="N", help=text)

    buckets = parser.add_argument_group("buckets of the distributed optimizer")
    buckets.add_argument(
        "--overlap", action="store_true", help="overlap_grad_reduce: Megatron's default bucket size"
    )
    buckets.add_argument(
        "--bucket-size", type=_natural, metavar="N", help="elements of a bucket; implies --overlap"
    )
    buckets.add_argument(
        "--high-busbw", action="store_true", help="pad_buckets_for_high_nccl_busbw"
    )

    parser.add_argument(
        "--check-all",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="check the plan of every rank and the cover over all ranks (default: on)",
    )
    parser.add_argument(
        "--no-check", dest="check_all", action="store_false", help="same as --no-check-all"
    )
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="show progress on stderr (default: on a terminal)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run_plan(args: argparse.Namespace) -> int:
    """Runs `vime-optim plan`. Returns 0, or 1 after printing why there is no sound plan."""
    try:
        shape, layout = shape_from(args), layout_from(args)
        began_s = time.perf_counter()
        job = _with_progress(shape, layout, args)
        seconds = time.perf_counter() - began_s
    except (PlanError, SettingsError) as error:
        print(error, file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(as_json(job, seconds), indent=2))
    else:
        _print_table(job, seconds)
    return 0


def shape_from(args: argparse.Namespace) -> ModelShape:
    """The model: the preset with explicit flags on top, or the flags alone.

    Raises:
        SettingsError: there is no preset, and flags are missing.
    """
    given = {
        f.name: value
        for f in fields(ModelShape)
        if f.name != "name" and (value := getattr(args, f.name, None)) is not None
    }
    if args.preset is not None:
        preset = PRESETS[args.preset]
        return replace(preset, name=f"{preset.name} (changed)", **given) if given else preset
    missing = [f"--{name.replace('_', '-')}" for name in REQUIRED_SHAPE if name not in given]
    if missing:
        raise SettingsError(
            "The model's shape is incomplete",
            got=f"no {', '.join(missing)}",
            expected="--preset, or every length of the model",
        )
    return ModelShape(name="model", **given)


def layout_from(args: argparse.Namespace) -> ParallelLayout:
    """The parallel layout; the world size follows from --dp, or is given.

    Raises:
        SettingsError: --dp and --world-size contradict each other.
        PlanError: the world size does not divide.
    """
    model_ranks = args.tp * args.pp * args.cp
    world_size = args.world_size
    if world_size is None:
        world_size = model_ranks * (1 if args.dp is None else args.dp)
    elif args.dp is not None and world_size != model_ranks * args.dp:
        raise SettingsError(
            "--dp and --world-size contradict each other",
            got=f"--world-size {world_size}",
            expected=f"TP x PP x CP x DP = {model_ranks * args.dp}",
            next_step="Give one of them",
        )
    etp = args.etp if args.etp is not None else (args.tp if args.ep == 1 else 1)
    return ParallelLayout(
        world_size=world_size,
        split=ModelSplit(args.tp, args.pp, args.ep, etp, args.last_stage_layers),
        cp=args.cp,
        overlap=args.overlap or args.bucket_size is not None,
        bucket_numel=args.bucket_size,
        high_busbw=args.high_busbw,
    )


def as_json(job: JobEstimate, seconds: float) -> dict[str, object]:
    """Everything there is to know about a job, in units named by the keys."""
    return {
        "model": asdict(job.shape),
        "layout": asdict(job.layout),
        "data_parallel": {"dense": job.layout.dp_cp, "expert": job.layout.edp},
        "model_numel": job.model_numel,
        "checkpoint_keys": job.keys,
        "checked": job.checked,
        "ours_extra_host_bytes": 0,
        "ours_received_bytes": 0,
        "per_rank": {
            name: {"min": s.least, "mean": s.mean, "max": s.most, "sum": s.total}
            for name, s in job.figures.items()
        },
        "planner": {"time_s": seconds, "peak_rss_bytes": _peak_rss_bytes()},
    }


def _with_progress(
    shape: ModelShape, layout: ParallelLayout, args: argparse.Namespace
) -> JobEstimate:
    wanted = sys.stderr.isatty() if args.progress is None else args.progress
    if not wanted:
        return estimate_job(shape, layout, check=args.check_all)
    columns = (TextColumn("ranks"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("ranks", total=layout.world_size)

        def advance(_: RankEstimate) -> None:
            progress.advance(task)

        return estimate_job(shape, layout, check=args.check_all, on_rank=advance)


def _print_table(job: JobEstimate, seconds: float) -> None:
    layout, split = job.layout, job.layout.split
    console = Console(width=WIDTH, highlight=False)
    console.print(
        f"{job.shape.name}: {job.model_numel / 1e9:.2f} billion parameters, "
        f"{job.keys} checkpoint tensors of optimizer state"
    )
    console.print(
        f"{layout.world_size} ranks: TP {split.tp}, PP {split.pp}, CP {layout.cp}, "
        f"EP {split.ep}, ETP {split.etp}, DP {layout.dp_cp // layout.cp}, expert DP {layout.edp}"
    )
    table = Table(title="Per rank: mean (most)", title_justify="left", width=WIDTH)
    table.add_column("fully_reshardable", no_wrap=True)
    table.add_column("vime_optim", justify="right", no_wrap=True)
    table.add_column("stock", justify="right", no_wrap=True)
    for label, ours, stock in _rows(job.figures):
        table.add_row(label, ours, stock)
    console.print(table)
    console.print("Stock as of megatron-core 0.16.1, without fully-parallel save and load.")
    if job.checked:
        console.print(
            f"Checked: {layout.world_size} plans; every tensor is written exactly once, and each "
            "rank reads exactly its own shards."
        )
    else:
        console.print("Not checked.")
    rss_bytes = _peak_rss_bytes()
    console.print(f"Planned in {seconds:.1f} s with {rss_bytes / 1e6:.0f} MB.")


def _rows(f: dict[str, Spread]) -> list[tuple[str, str, str]]:
    return [
        ("own optimizer state", _size(f["own_bytes"]), _size(f["own_bytes"])),
        ("save: extra host memory", "0", _size(f["stock_host_bytes"])),
        ("save: extra device memory", "0", _size(f["stock_device_bytes"])),
        ("save: received by collectives", "0", _size(f["stock_received_bytes"])),
        ("save: boxes held", _count(f["boxes"]), _count(f["stock_tensors"])),
        ("save: boxes written", _count(f["written_boxes"]), ""),
        ("save: bytes written", _size(f["write_bytes"]), _size(f["stock_write_bytes"])),
        ("save: files", _count(f["files"]), _count(f["stock_files"])),
        ("load: extra host memory", "0", _size(f["stock_template_bytes"])),
        ("load: bytes read", _size(f["read_bytes"]), _size(f["stock_template_bytes"])),
    ]


def _size(spread: Spread) -> str:
    return f"{_bytes(spread.mean)} ({_bytes(spread.most)})"


def _count(spread: Spread) -> str:
    return f"{spread.mean:,.1f} ({spread.most:,})"


def _bytes(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"


def _peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value

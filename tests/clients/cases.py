"""The cases: arguments of the real pretrain_gpt.py, and how a framework calls it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from clients.trees import TREES

SAVED_AT = 3

TINY = shlex.split("""
--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 32
--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4 --bf16 --seed 1234
--lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-decay-iters 6 --lr-warmup-iters 1
--weight-decay 0.1 --clip-grad 1.0 --train-iters 6 --log-interval 1 --eval-iters 0
--eval-interval 1000 --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --split 1,0,0
--num-workers 0 --transformer-impl local --no-masked-softmax-fusion
--no-gradient-accumulation-fusion --no-persist-layer-norm --no-bias-swiglu-fusion
--no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion --position-embedding-type rope
--attention-dropout 0.0 --hidden-dropout 0.1 --distributed-timeout-minutes 3 --save-interval 3
--distributed-backend gloo --ckpt-format torch_dist
""")

PLAIN = ("--use-distributed-optimizer",)
PAO = (*PLAIN, "--use-precision-aware-optimizer")
HYBRID = (*PAO, "--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d")
HALF = (*HYBRID, "--optimizer-offload-fraction", "0.5")
WHOLE = (*HYBRID, "--optimizer-offload-fraction", "1.0")
PERSIST = ("--use-persistent-ckpt-worker",)
MCORE = ("--async-save", "--async-strategy", "mcore", *PERSIST)
NVRX = ("--async-save", "--async-strategy", "nvrx", *PERSIST)
CONSTANT = ("--ckpt-assume-constant-structure", "--save-interval", "1")
LOCAL = shlex.split("""
--non-persistent-ckpt-type local --non-persistent-local-ckpt-dir {out}/local
--non-persistent-save-interval 4
""")
#: A learning rate too small to change a bit: what was loaded is still there after a step.
STILL = shlex.split("--lr 1e-30 --min-lr 1e-30 --lr-warmup-iters 0 --override-opt_param-scheduler")
#: What slime sets for every run (slime/backends/megatron_utils/arguments.py).
SLIME = (*PERSIST, "--ckpt-fully-parallel-load", *CONSTANT)

OLD, NEW, MAIN, SLIMES = TREES
WITH_STRATEGIES = (NEW, MAIN)


@dataclass(frozen=True)
class Case:
    """One way to save and resume.

    `both`, `full` and `resume` are arguments of both runs or of one; {out} is the case's folder.
    `callers` are functions of callers.py, for both runs unless `callers_of_full` says otherwise.
    `judge`: "resumed", the runs are equal from `first_compared` on; "kept", a load without the
    optimizer keeps the saved parameters through steps that change nothing. `spread`: the trees on
    which CI runs it.
    """

    name: str
    both: tuple[str, ...]
    full: tuple[str, ...] = ()
    resume: tuple[str, ...] = ()
    callers: tuple[str, ...] = ()
    callers_of_full: tuple[str, ...] | None = None
    judge: str = "resumed"
    first_compared: int = SAVED_AT + 1
    install: str = "after"
    adam: str = "torch"
    nvrx: bool = False
    real_main: bool = False
    world_size: int = 2
    trees: tuple[str, ...] = TREES
    spread: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.callers_of_full is None:
            object.__setattr__(self, "callers_of_full", self.callers)


def arguments_of(case: Case, phase: str, out: Path, tree: Path) -> list[str]:
    """The arguments of one run of a case, in the words that the tree's parser knows."""
    if phase == "full":
        words = [*case.both, "--save", "{out}/saved", *case.full]
    else:
        words = [*case.both, "--save-interval", "1000", "--load", "{out}/saved"]
        words += ["--save", "{out}/again", *case.resume]
    words = [word.replace("{out}", str(out)) for word in words]
    return words if _knows_strategies(tree) else _without("--async-strategy", words)


def _knows_strategies(tree: Path) -> bool:
    files = (tree / "megatron" / "training").glob("**/*.py")
    return any("async_strategy" in file.read_text() for file in files)


def _without(option: str, words: list[str]) -> list[str]:
    """`words` less an option and its value: before 0.18 there is one strategy."""
    if option not in words:
        return words
    at = words.index(option)
    return words[:at] + words[at + 2 :]


CASES = (
    Case("plain", PLAIN, spread=(OLD,)),
    Case("plain-te", PLAIN, adam="te"),
    Case("pao-te", PAO, adam="te", spread=(NEW,)),
    Case("plain-fully", (*PLAIN, "--dist-ckpt-optim-fully-reshardable")),
    Case("plain-async", (*PLAIN, *MCORE)),
    Case("plain-constant", (*PLAIN, *MCORE, *CONSTANT)),
    Case("plain-no-load-optim", PLAIN, resume=("--no-load-optim", *STILL), judge="kept"),
    Case("plain-finetune", PLAIN, resume=("--finetune", *STILL), judge="kept"),
    Case("plain-torch-format", (*PLAIN, "--ckpt-format", "torch")),
    Case("half", HALF, spread=(NEW, SLIMES)),
    Case("half-late", HALF, install="late"),
    Case("half-first", HALF, install="first", spread=(MAIN,)),
    Case("whole", WHOLE, spread=(MAIN,)),
    Case("half-fully", (*HALF, "--dist-ckpt-optim-fully-reshardable")),
    Case("half-async", (*HALF, *MCORE), spread=(NEW,)),
    Case("whole-async", (*WHOLE, *MCORE)),
    Case("half-async-real-main", (*HALF, *MCORE), real_main=True),
    Case("half-async-spawn", (*HALF, *MCORE), callers=("worker_by_spawn",), trees=WITH_STRATEGIES),
    Case("half-async-fork", (*HALF, *MCORE), callers=("worker_by_fork",), trees=WITH_STRATEGIES),
    Case("half-async-nvrx", (*HALF, *NVRX), nvrx=True, trees=WITH_STRATEGIES),
    Case("plain-async-nvrx", (*PLAIN, *NVRX), nvrx=True, trees=WITH_STRATEGIES),
    Case("half-async-forked", (*HALF, "--async-save"), trees=(OLD, SLIMES), spread=(OLD,)),
    Case("half-async-workers", (*HALF, *MCORE, "--dist-ckpt-workers", "3"), trees=WITH_STRATEGIES),
    Case("half-constant", (*HALF, *MCORE, *CONSTANT)),
    Case("half-constant-sync", (*HALF, *CONSTANT)),
    Case("half-parallel-load", (*HALF, "--ckpt-fully-parallel-load")),
    Case("half-no-load-optim", HALF, resume=("--no-load-optim", *STILL), judge="kept"),
    Case("half-finetune", HALF, resume=("--finetune", *STILL), judge="kept", spread=(NEW,)),
    Case("half-torch-format", (*HALF, "--ckpt-format", "torch")),
    Case("half-local", (*HALF, *LOCAL), nvrx=True, first_compared=5, spread=(NEW,)),
    Case("plain-local", (*PLAIN, *LOCAL), nvrx=True, first_compared=5),
    Case("slime-sync", (*WHOLE, *SLIME), spread=(SLIMES,)),
    Case("slime-async", (*WHOLE, "--async-save", *SLIME), trees=(SLIMES, OLD)),
    # The planner of slime's tree loads what the checkpoint has; here every layer gets new norms.
    Case(
        "plain-new-parameters",
        PLAIN,
        resume=("--finetune", "--qk-layernorm", *STILL),
        judge="kept",
        trees=(SLIMES,),
        spread=(SLIMES,),
    ),
    Case("half-areal", HALF, callers=("areal",), spread=(OLD,)),
    Case("plain-areal", PLAIN, callers=("areal",)),
    Case("pao-te-areal", PAO, adam="te", callers=("areal",)),
    Case("half-bridge", HALF, callers=("bridge",), spread=(NEW,)),
    Case("whole-bridge", WHOLE, callers=("bridge",)),
    Case(
        "half-finetune-bridge",
        HALF,
        resume=("--finetune", *STILL),
        judge="kept",
        callers=("bridge",),
    ),
    Case("half-verl", HALF, callers=("verl",), spread=(NEW,)),
    Case("plain-verl", PLAIN, callers=("verl",)),
    Case("pao-te-verl", PAO, adam="te", callers=("verl",)),
    Case("half-verl-split", HALF, callers=("verl_split",), spread=(OLD,)),
    Case("half-swiglu-verl-split", (*HALF, "--swiglu"), callers=("verl_split",)),
    Case("plain-verl-split", PLAIN, callers=("verl_split",)),
    Case("pao-te-verl-split", PAO, adam="te", callers=("verl_split",)),
)


def restarted(case: Case) -> Case:
    """The case with a resume that restarts in its process instead of in fresh ranks."""
    return replace(
        case,
        name=f"{case.name}-restart",
        resume=("--save", "{out}/again", "--load", "{out}/again", "--save-interval", "3"),
        callers=("restart_in_process",),
        callers_of_full=(),
    )


CASES += tuple(restarted(case) for case in CASES if case.name in ("plain", "half", "half-async"))

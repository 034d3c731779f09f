"""The resume matrix: which cases must be exact with vime_optim.install().

`SPREAD` is what CI runs, in minutes: every release, optimizer, format and kind of layout change at
least once. `FULL` is all of it (`make matrix`), from which docs take the support table.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from tests.cases import GROUPS, SOURCE_TREES, Case
from vime_optim.tools.megatron_source import RELEASES

#: Every optimizer of the matrix, in the words of a case.
BACKENDS = (
    "hybrid,pao,f=1",
    "hybrid,pao,f=0.5",
    "hybrid,pao,f=0.25",
    "hybrid,nopao,f=1",
    "hybrid,nopao,f=0.5",
    "hybrid,nopao,f=0.25",
    "hybrid,pao,f=0.5,torchonly",
    "fused,pao",
    "fused,pao,norem",
    "fused,pao,m=bf16,v=bf16",
    "fused,pao,m=fp16,v=fp16",
    "fused,nopao",
    "torch",
)

#: The same with NVIDIA Apex's FusedAdam; a smaller part of the matrix.
APEX = (
    "fused,apex,nopao",
    "fused,apex,nopao,capturable",
    "hybrid,apex,pao,f=0.5",
    "hybrid,apex,pao,f=0.25",
    "hybrid,apex,nopao,f=0.5",
    "hybrid,apex,nopao,f=0.25",
)
_WITH_APEX = (
    "dp=2",
    "dp=2,dp_reshardable",
    "dp=2->3",
    "dp=2->1",
    "dp=1,tp=2->1",
    "dp=2->1,fp32norm",
    "dp=2,moe,ep=2",
    "dp=2,moe,ep=2->1,groups=both",
    "dp=2,moe,ep=2,train=dense,dp_reshardable",
    "dp=2,pp=2,moe,ep=2,moe-on=last",
    "dp=1,pp=2,moe,moe-on=last,train=experts",
    "dp=2,fp16,scale=22",
    "dp=3,bucket=40,groups=wd_mult",
    "dp=2,groups=max_lr,regrouped",
    "dp=2,steps=0",
    "dp=2,steps=0,dp_reshardable",
    "dp=2,async=forked",
    "dp=2,async=persistent",
    "dp=2,async=persistent,dp_reshardable",
    "dp=2,load:torch",
    "dp=2,load:fused,load:pao",
)

#: Optimizers whose state is on the device, coded in some: an async writer gets copies of it.
_ON_DEVICE = (
    "fused,pao",
    "fused,pao,norem",
    "fused,pao,m=fp16,v=fp16",
    "fused,pao,m=fp8,v=fp8",
    "fused,nopao",
    "torch",
)

#: Layouts that keep the sizes, and those that change them (fully_reshardable alone can).
SAME = ("dp=2", "dp=3", "dp=4", "dp=1,tp=2", "dp=1,pp=2")
CHANGED = (
    "dp=2->3",
    "dp=3->2",
    "dp=4->2",
    "dp=1->3",
    "dp=1,tp=2->1",
    "dp=2->1,tp=1->2",
    "dp=1,pp=2->1",
    "dp=2->1,pp=1->2",
    "dp=2->1,tp=1->2,pp=2->1",
)
#: Every release and source tree: the columns of the matrix.
COLUMNS = (*RELEASES, *SOURCE_TREES)
#: Releases on which every backend is loaded into every other.
_CROSS_RELEASES = ("0.16.1", "0.19.2")
MODELS = ("tied", "fp32norm", "moe,ep=2", "1bucket")

#: In CI, on every release.
_EVERY_RELEASE = ("hybrid,pao,f=1,dp=3->2",)

#: In CI, on the one release named: together all optimizers, formats, changes and models.
_ONCE = (
    "0.15.3,hybrid,pao,f=0.5,dp=2,dp_reshardable",
    "0.19.2,hybrid,pao,f=0.5,dp=2,dp_reshardable",
    "0.15.3,hybrid,nopao,f=0.25,dp=2,dp_reshardable",
    "0.15.3,torch,dp=2->3",
    "0.15.3,fused,pao,dp=2,dp_reshardable",
    "0.16.1,fused,pao,dp=2->3",
    "0.16.1,hybrid,nopao,f=1,dp=2,fp32norm",
    "0.16.1,hybrid,pao,f=1,dp=2,default,tied",
    "0.16.1,torch,dp=2,dp_reshardable",
    "0.16.1,hybrid,pao,f=1,dp=1,tp=2->1",
    "0.16.1,hybrid,nopao,f=1,dp=2,model-only",
    "0.17.1,hybrid,pao,f=0.25,dp=2,moe,ep=2",
    "0.17.1,hybrid,pao,f=1,dp=2->1,pp=1->2",
    "0.17.1,hybrid,pao,f=1,dp=2,dp_reshardable,training",
    "0.17.1,fused,pao,norem,dp=2,load:hybrid,load:f=1",
    "0.18.2,fused,pao,m=bf16,v=bf16,dp=2",
    "0.18.2,torch,dp=2,moe,ep=2->1",
    "0.19.2,hybrid,pao,f=0.5,dp=3->2,dp_reshardable,training",
    "0.19.2,hybrid,nopao,f=0.5,dp=2->3",
    "0.19.2,fused,nopao,dp=2,dp_reshardable",
    "0.19.2,hybrid,pao,f=1,dp=2,load:fused",
    "0.19.2,fused,pao,m=fp8,v=fp16,dp=2,1bucket",
    "0.19.2,fused,pao,dp=3->2,fp32norm",
    "0.19.2,hybrid,nopao,f=0.5,torchonly,dp=2,dp_reshardable",
    "0.18.2,hybrid,pao,f=0.5,dp=1,pp=2,moe,moe-on=last,train=experts",
    "0.15.3,fused,pao,dp=2,moe,ep=2,train=experts",
    "0.17.1,hybrid,nopao,f=0.5,dp=2,fp16,scale=22",
    "0.15.3,fused,pao,m=fp16,v=fp16,dp=2,async=forked",
    "0.19.2,fused,pao,dp=2,async=persistent",
    "0.15.3,hybrid,apex,pao,f=0.5,dp=2",
    "0.16.1,fused,apex,nopao,dp=2,dp_reshardable",
    "0.17.1,hybrid,apex,nopao,f=0.25,dp=2,dp_reshardable,moe,ep=2",
    "0.18.2,fused,apex,nopao,dp=2,load:fused,load:pao",
    "0.19.2,fused,apex,nopao,capturable,dp=2->3,groups=both",
    "main,hybrid,pao,f=0.5,dp=3->2",
    "main,fused,pao,dp=2->3",
    "slime,hybrid,pao,f=1,dp=2->3",
    "slime,fused,pao,dp=2,dp_reshardable",
)

#: Models, groups and moments of saving of the faults F20 to F25, for some backends each.
_BACKENDS_OF_FAULTS = ("hybrid,pao,f=0.5", "hybrid,nopao,f=1", "fused,pao", "fused,nopao", "torch")
_REPORTED = (
    "dp=2->1,fp32norm",
    "dp=1->3,fp32norm",
    "dp=3,fp32norm,dp_reshardable",
    "dp=2,pp=2,moe,ep=2,moe-on=last",
    "dp=2,pp=2,moe,ep=2,moe-on=first",
    "dp=2,pp=2->1,moe,ep=2,moe-on=last",
    "dp=2,pp=2,moe,ep=2,moe-on=last,dp_reshardable",
    "dp=1,pp=2,moe,moe-on=last,train=experts",
    "dp=3,bucket=40",
    "dp=4,bucket=40,dp_reshardable",
    "dp=4->2,bucket=40,dp_reshardable",
    "dp=2->4,bucket=40,dp_reshardable",
    "dp=2,moe,ep=2,train=experts",
    "dp=2,moe,ep=2,train=dense",
    "dp=2,moe,ep=2->1,train=experts",
    "dp=2,moe,ep=2,train=experts,dp_reshardable",
    *(f"dp=2,groups={kind}" for kind in GROUPS[1:]),
    *(f"dp=2->3,groups={kind},regrouped" for kind in GROUPS[1:]),
    "dp=2,groups=both,dp_reshardable",
    "dp=2,steps=0",
    "dp=2,steps=0,dp_reshardable",
    "dp=2,moe,ep=2,steps=0",
    "dp=2,fp16,scale=22",
    "dp=2,fp16,scale=22,dp_reshardable",
    "dp=2,fp16,scale=20",
    "dp=2,moe,ep=2,fp16,scale=20",
)


def spread() -> list[Case]:
    """The cases that CI runs."""
    every = [Case.parse(text, megatron=release) for release in RELEASES for text in _EVERY_RELEASE]
    return _unique([*every, *(Case.parse(text) for text in _ONCE)])


def full() -> list[Case]:
    """All cases of the matrix, the spread included."""
    cases = [*spread(), *(Case.parse(text) for text in _all_words())]
    # slime's patch makes Megatron's MoE layers import slime itself.
    return _unique([case for case in cases if case.megatron != "slime" or case.moe == "none"])


def _all_words() -> Iterator[str]:
    yield "0.18.2,hybrid,pao,f=0.5,dp=4->2,tied"
    yield "0.16.1,hybrid,nopao,f=1,dp=3,fp32norm"
    for release, backend in product(COLUMNS, BACKENDS):
        for layout in SAME:
            yield f"{release},{backend},{layout}"
            yield f"{release},{backend},{layout},dp_reshardable"
        for layout in CHANGED:
            if _is_exact_elsewhere(backend):
                yield f"{release},{backend},{layout}"
        for model in MODELS:
            yield f"{release},{backend},dp=2,{model}"
            yield f"{release},{backend},dp=2,{model},dp_reshardable"
        if _is_exact_elsewhere(backend):
            yield f"{release},{backend},dp=4->2,moe,ep=4->2"
    for release, backend, words in product(COLUMNS, _BACKENDS_OF_FAULTS, _REPORTED):
        yield f"{release},{backend},{words}"
    for release, saved, loaded in product(_CROSS_RELEASES, BACKENDS, BACKENDS):
        if saved != loaded and "16" not in saved + loaded:
            load_words = ",".join(f"load:{word}" for word in loaded.split(","))
            yield f"{release},{saved},dp=2,{load_words}"
    yield from _apex_words()
    for release, backend, mode in product(COLUMNS, _ON_DEVICE, ("forked", "persistent")):
        yield f"{release},{backend},dp=2,async={mode}"
        yield f"{release},{backend},dp=2,async={mode},dp_reshardable"
    for release, fraction in product(COLUMNS, ("1", "0.5")):
        if ways_of(release) >= "0.17":
            for layout in ("dp=2", "dp=3->2", "dp=1,tp=2->1"):
                yield f"{release},hybrid,pao,f={fraction},{layout},training,dp_reshardable"
        for mode in ("forked", "persistent"):
            yield f"{release},hybrid,pao,f={fraction},dp=2,async={mode}"
        for pao in ("pao", "nopao"):
            yield f"{release},hybrid,{pao},f={fraction},dp=2,model-only"


def _is_exact_elsewhere(backend: str) -> bool:
    """Scales of float16 states belong to a rank's shard: another layout makes others."""
    return "=fp16" not in backend


def _apex_words() -> Iterator[str]:
    for release, backend in product(RELEASES, APEX):
        if "capturable" in backend and release < "0.17":
            continue
        for words in _WITH_APEX:
            yield f"{release},{backend},{words}"
        for saved in ("torch", "fused,pao", "fused,nopao", "hybrid,pao,f=1"):
            load_words = ",".join(f"load:{word}" for word in backend.split(","))
            yield f"{release},{saved},dp=2,{load_words}"


def _unique(cases: list[Case]) -> list[Case]:
    return list({case.name: case for case in cases}.values())


def ways_of(megatron: str) -> str:
    """The release whose ways a column has."""
    return SOURCE_TREES.get(megatron, megatron)


def needed_faults(case: Case) -> set[str]:
    """Faults that stock megatron-core shows in this case, so a fix for each must have been hit."""
    if case.model_only:
        return {"F12"} if case.backend.optimizer != "torch" else set()
    release = ways_of(case.megatron)
    old = release.startswith(("0.15", "0.16"))
    backend = case.backend
    # PAO with CPU offload is saved as fully_reshardable, whatever the caller asks for.
    enforced = backend.optimizer == "hybrid" and backend.pao
    fully = case.sharding != "dp_reshardable" or enforced
    faults = {"F11", "F16"} if fully else set()
    if backend.optimizer == "torch":
        faults.add("F8")
    if backend.optimizer == "fused" and backend.pao:
        if not fully and old:
            faults.add("F6")
        if fully and backend.remainders:
            faults.add("F7")
    if backend.optimizer == "hybrid":
        faults |= _hybrid_faults(case, fully)
    return faults | _model_faults(case, fully)


def _model_faults(case: Case, fully: bool) -> set[str]:
    has_experts = case.moe != "none"
    shows = {
        "F20": case.fp32_norm,
        "F21": has_experts
        and ((case.layout.ep > 1) != (case.load_layout.ep > 1) or case.moe_layers != "all"),
        "F22": case.bucket_numel is not None and not fully,
        "F23": case.trained == "experts" and case.layout.ep > 1,
        "F24": case.groups in ("max_lr", "min_lr", "both")
        and ways_of(case.megatron)[:4] in _MIXED_UP,
        "F25": case.num_steps == 0,
        "F29": case.backend.capturable,
    }
    return {fault for fault, is_shown in shows.items() if is_shown}


#: Releases that pair param groups by too few of their values.
_MIXED_UP = ("0.16", "0.17", "0.18")


def _hybrid_faults(case: Case, fully: bool) -> set[str]:
    faults = {"F10"}
    if not fully:
        faults |= {"F1", "F2"} if ways_of(case.megatron).startswith("0.15") else {"F3"}
    if case.load_backend.optimizer == "hybrid":
        faults.add("F15")
        if case.load_backend.offload_fraction < 1:
            faults.add("F4")
        if not case.load_backend.pao:
            faults.add("F5")
    if ways_of(case.megatron) < "0.19":
        faults.add("F9")
    return faults

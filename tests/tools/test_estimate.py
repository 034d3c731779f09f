"""Parameters, buffers, plans and figures on paper."""

from __future__ import annotations

from dataclasses import replace
from math import lcm, prod

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from vime_optim.errors import PlanError
from vime_optim.reshard.keys import digest_of
from vime_optim.reshard.plan import ParamRun, check_cover, check_local
from vime_optim.tools.estimate.buffers import Buffer, ParallelLayout, build_buffer
from vime_optim.tools.estimate.ranks import (
    STATES,
    CoverCheck,
    JobPlanner,
    estimate_job,
    stock_cost,
)
from vime_optim.tools.estimate.shapes import PRESETS, ModelParam, ModelShape, ModelSplit

TINY = ModelShape("tiny", 2, 24, 4, 2, 6, 20, 50, vocab_multiple=1)
TINY_TIED = replace(TINY, tied=True)
TINY_MOE = replace(TINY, experts=4, ffn=10)


def param(name, shape, *, shared=False, replica=(0, 0, 0)):
    target = ParamRun(name, shape, (0,) * len(shape), shape, 0, replica)
    return ModelParam(name, shape, shape, (0,) * len(shape), False, shared, (target,))


# --- buffers


def test_buffer_places_parameters_in_reverse_with_padding():
    params = [param("a", (100,)), param("b", (70,)), param("c", (64,))]
    buffer = build_buffer(params, 3, None)
    assert [p.name for p in buffer.params] == ["c", "b", "a"]
    assert buffer.starts == (0, 64, 192)
    assert buffer.ends == (64, 134, 292)
    (bucket,) = buffer.buckets
    assert (bucket.start, bucket.end, bucket.numel_unpadded) == (0, 384, 292)


def test_buckets_close_when_full_and_start_padded():
    params = [param(n, (size,)) for n, size in (("a", 10), ("b", 200), ("c", 130), ("d", 100))]
    buffer = build_buffer(params, 2, 150)
    # d 0..100 and c 128..258 fill the first bucket; b fills one alone; a is left.
    assert [(b.start, b.end, b.numel_unpadded) for b in buffer.buckets] == [
        (0, 384, 258),
        (384, 640, 200),
        (640, 768, 10),
    ]
    assert buffer.starts == (0, 128, 384, 640)
    assert (buffer.numel, buffer.numel_unpadded) == (768, 468)
    assert build_buffer(params, 2, None, high_busbw=True).numel == 1 << 16


def test_a_shared_embedding_has_a_bucket_of_its_own():
    params = [param("a", (10,)), param("e", (20,), shared=True), param("c", (30,))]
    buffer = build_buffer(params, 2, None)
    # The bucket before it ends at the padded start of the embedding, as Megatron counts it.
    assert [(b.start, b.end, b.numel_unpadded) for b in buffer.buckets] == [
        (0, 128, 64),
        (128, 256, 20),
        (256, 384, 10),
    ]
    assert build_buffer([], 2, None).numel == 0


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.booleans()), min_size=1, max_size=12),
    st.integers(1, 7),
    st.one_of(st.none(), st.integers(1, 600)),
)
def test_the_ranks_of_a_group_own_every_element_once(sizes, group, bucket_numel):
    params = [param(f"p{i}", (n,), shared=s) for i, (n, s) in enumerate(sizes)]
    buffer = build_buffer(params, group, bucket_numel)
    held = {p.name: np.zeros(p.local_shape, dtype=int) for p in params}
    for rank in range(group):
        owned = list(buffer.owned(rank))
        assert sum(e - s for _, s, e in owned) <= buffer.numel // group
        for p, start, end in owned:
            assert 0 <= start < end <= held[p.name].size
            held[p.name][start:end] += 1
    assert all((count == 1).all() for count in held.values())
    assert all(start % 64 == 0 for start in buffer.starts)
    assert all(b.start % 128 == 0 for b in buffer.buckets)
    assert all(
        (b.end - b.start) % lcm(group, 128) == 0 or b.end % lcm(group, 128) == 0
        for b in buffer.buckets
    )
    assert all(a.end == b.start for a, b in zip(buffer.buckets, buffer.buckets[1:], strict=False))


def test_coordinates_follow_the_default_rank_order():
    layout = ParallelLayout(32, ModelSplit(tp=2, pp=2, ep=4, etp=1), cp=2)
    assert (layout.dp_cp, layout.edp) == (8, 4)
    at = layout.coordinates(16 + 11)  # the second stage's 12th rank
    assert (at.tp, at.pp, at.dp) == (1, 1, 5)
    assert (at.etp, at.ep, at.edp) == (0, 3, 2)
    seen = {(c.pp, c.tp, c.dp, c.etp, c.ep, c.edp) for c in map(layout.coordinates, range(32))}
    assert len(seen) == 32


def test_bucket_size_follows_megatron():
    layout = ParallelLayout(128, ModelSplit(tp=1, pp=2), cp=1)
    assert layout.stage_bucket_numel(0) is None
    layout = replace(layout, overlap=True)
    assert layout.stage_bucket_numel(0) == 64_000_000
    assert layout.stage_bucket_numel(1) is None  # later stages do not bucket
    assert replace(layout, cp=2).stage_bucket_numel(0) == 40_000_000
    assert replace(layout, bucket_numel=7).stage_bucket_numel(0) == 7


def test_world_sizes_that_do_not_divide_are_refused():
    with pytest.raises(PlanError, match="TP x PP x CP"):
        ParallelLayout(6, ModelSplit(tp=4))
    with pytest.raises(PlanError, match="ETP x EP x PP"):
        ParallelLayout(6, ModelSplit(ep=4))


# --- plans and figures

LAYOUTS = [
    (TINY, ParallelLayout(1)),
    (TINY, ParallelLayout(3)),
    (TINY, ParallelLayout(12, ModelSplit(tp=2, pp=2))),
    (TINY_TIED, ParallelLayout(12, ModelSplit(tp=2, pp=2), overlap=True, bucket_numel=500)),
    (TINY_TIED, ParallelLayout(10, ModelSplit(tp=2), cp=5)),
    (TINY_MOE, ParallelLayout(4, ModelSplit(tp=2, etp=2))),
    (TINY_MOE, ParallelLayout(24, ModelSplit(tp=2, pp=2, ep=2, etp=1))),
    (replace(TINY_MOE, fused_norms=False), ParallelLayout(16, ModelSplit(ep=4, etp=2))),
]


@pytest.mark.parametrize(("shape", "layout"), LAYOUTS)
def test_full_plans_write_every_element_of_every_state_once(shape, layout):
    """Brute force: mark every element of every checkpoint tensor."""
    planner = JobPlanner(shape, layout)
    plans = [planner.rank_plan(rank) for rank in range(layout.world_size)]
    keys = {info.key: info for plan in plans for info in plan.keys}
    written = {key: np.zeros(info.global_shape, dtype=int) for key, info in keys.items()}
    for plan in plans:
        check_local(plan)
        for piece in plan.pieces:
            if piece.is_main_replica:
                box = (slice(o, o + s) for o, s in zip(piece.offset, piece.size, strict=True))
                written[piece.key][tuple(box)] += 1
    assert all((count == 1).all() for count in written.values())
    shapes = {key: info.global_shape for key, info in keys.items()}
    every = [(plan.rank, piece) for plan in plans for piece in plan.pieces]
    for key, whole in shapes.items():
        check_cover(key, whole, [(rank, piece) for rank, piece in every if piece.key == key])
    prefixed = {
        f"optimizer.state.{state}.{key}": value
        for key, value in planner.global_shapes().items()
        for state in STATES
    }
    assert shapes == prefixed
    # Ranks of one data-parallel group list the same keys, whatever they hold.
    for at, plan in zip(map(layout.coordinates, range(layout.world_size)), plans, strict=True):
        if (at.pp, at.tp) == (0, 0):
            assert digest_of(plan.keys) == digest_of(plans[0].keys)


@pytest.mark.parametrize(("shape", "layout"), LAYOUTS)
def test_figures_are_those_of_the_full_plans(shape, layout):
    planner = JobPlanner(shape, layout)
    seen = []
    job = estimate_job(shape, layout, on_rank=seen.append)
    assert job.checked
    assert [e.rank for e in seen] == list(range(layout.world_size))
    for e in seen:
        pieces = planner.rank_plan(e.rank).pieces
        main = [p for p in pieces if p.is_main_replica]
        assert (e.boxes, e.written_boxes) == (len(pieces), len(main))
        assert e.own_bytes == e.read_bytes == 4 * sum(p.numel for p in pieces)
        assert e.write_bytes == 4 * sum(p.numel for p in main)
        assert e.files == min(2, len(main))
    total = 12 * sum(prod(s) for s in planner.global_shapes().values())
    # Ours and stock write the same bytes: each element of each state once.
    assert job.figures["write_bytes"].total == total
    assert job.figures["stock_write_bytes"].total == total
    assert job.model_numel * 12 == total
    for name in ("own_bytes", "boxes", "stock_host_bytes"):
        spread = job.figures[name]
        assert spread.least <= spread.mean <= spread.most


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_layout_covers(data):
    groups = data.draw(st.integers(1, 2)) * 2
    shape = ModelShape(
        "any",
        layers=data.draw(st.integers(1, 4)),
        hidden=data.draw(st.integers(1, 9)),
        heads=groups * data.draw(st.integers(1, 2)),
        kv_groups=groups,
        head_dim=data.draw(st.integers(1, 3)),
        ffn=4 * data.draw(st.integers(1, 4)),
        vocab=data.draw(st.integers(1, 40)),
        experts=data.draw(st.sampled_from([0, 4])),
        tied=data.draw(st.booleans()),
        qk_norm=data.draw(st.booleans()),
        vocab_multiple=data.draw(st.integers(1, 8)),
        fused_norms=data.draw(st.booleans()),
        homogeneous_layers=data.draw(st.booleans()),
    )
    tp = data.draw(st.sampled_from([1, 2]))
    ep = data.draw(st.sampled_from([1, 2, 4])) if shape.experts else 1
    etp = tp if ep == 1 else data.draw(st.sampled_from([1, 2]))
    pp = data.draw(st.integers(1, shape.layers))
    split = ModelSplit(tp, pp, ep, etp)
    try:
        split.stage_layers(shape)
    except PlanError:
        assume(False)
    world = lcm(tp * pp, ep * etp * pp) * data.draw(st.integers(1, 5))
    layout = ParallelLayout(
        world, split, overlap=True, bucket_numel=data.draw(st.integers(1, 2000))
    )
    job = estimate_job(shape, layout)
    assert job.checked
    assert job.figures["own_bytes"].total >= job.figures["write_bytes"].total


@pytest.mark.parametrize("fault", ["lost", "twice", "shifted"])
def test_the_cover_check_sees_a_wrong_plan(fault):
    """The check works on what the ranks give, not on what the planner meant."""
    layout = ParallelLayout(4, ModelSplit(tp=2))
    planner = JobPlanner(TINY, layout)
    check = CoverCheck()
    for rank in range(4):
        pieces = [p for p in planner.rank_plan(rank, STATES[:1]).pieces if p.is_main_replica]
        if rank == 2 and fault == "lost":
            pieces.pop()
        if rank == 2 and fault == "twice":
            pieces.append(pieces[0])
        if rank == 2 and fault == "shifted":
            index = next(i for i, p in enumerate(pieces) if p.size[0] == 1 and len(p.size) == 3)
            wrong = pieces[index]
            pieces[index] = replace(wrong, offset=(1 - wrong.offset[0], *wrong.offset[1:]))
        check.add(rank, pieces)
    shapes = {f"optimizer.state.param.{k}": v for k, v in planner.global_shapes().items()}
    with pytest.raises(PlanError) as caught:
        check.finish(shapes)
    assert "optimizer.state.param." in str(caught.value)


# --- stock


def test_stock_peak_is_the_one_measured_on_h200():
    """7.1 GB of own state at DP=2: +35.5 GB host and +11.8 GB device per rank were measured."""
    numel = 1_183_333_376
    buffer = build_buffer([param("all", (numel,))], 2, None)
    cost = stock_cost([[buffer]])
    assert cost.host_bytes / 1e9 == pytest.approx(35.5, abs=0.05)
    assert cost.device_bytes / 1e9 == pytest.approx(11.8, abs=0.05)
    assert cost.template_bytes == 12 * numel
    assert cost.received_bytes == 6 * numel
    assert cost.tensors == 3


def test_stock_peak_of_several_buckets_and_optimizers():
    params = [param(n, (256,)) for n in "abc"]
    buffer = build_buffer(params, 2, 256)
    assert len(buffer.buckets) == 3
    one = stock_cost([[buffer]])
    # World 3 x 768; at a new bucket the old shards (3 x 128), the old list and concatenation (256
    # each) are alive beside the new shards.
    assert one.host_bytes == 4 * (3 * 768 + 2 * 3 * 128 + 2 * 256)
    assert one.received_bytes == 4 * 3 * 3 * 128
    two = stock_cost([[buffer], [buffer]])
    assert two.host_bytes == one.host_bytes + 4 * 3 * 768  # the first world stays
    assert two.device_bytes == one.device_bytes == 4 * (2 * 256 + 128)
    assert stock_cost([[Buffer((), (), (), (), 2)]]).host_bytes == 0


# --- scale


def test_4096_ranks_of_the_largest_preset():
    shape = PRESETS["Qwen3-235B-A22B"]
    split = ModelSplit(tp=4, pp=8, ep=32, etp=1)
    job = estimate_job(shape, ParallelLayout(4096, split))
    assert job.checked
    figures = job.figures
    assert figures["boxes"].count == 4096
    assert figures["boxes"].most <= 51
    assert figures["write_bytes"].total == 12 * job.model_numel
    assert figures["own_bytes"].most < 1.05 * figures["own_bytes"].mean
    assert figures["stock_host_bytes"].least > 30 * figures["own_bytes"].most


def test_boxes_do_not_grow_with_data_parallelism():
    shape = PRESETS["Qwen3-4B"]
    most = []
    for dp in (1, 4, 16, 64, 256):
        layout = ParallelLayout(2 * dp, ModelSplit(tp=2))
        most.append(estimate_job(shape, layout).figures["boxes"].most)
    assert most == sorted(most, reverse=True)
    assert most[-1] < most[0] / 8

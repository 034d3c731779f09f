"""Parameters of a model shape: counts, order, cuts and keys."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from vime_optim.errors import PlanError
from vime_optim.reshard.plan import ParamRun
from vime_optim.tools.estimate.buffers import ParallelLayout
from vime_optim.tools.estimate.ranks import JobPlanner
from vime_optim.tools.estimate.shapes import PRESETS, ModelShape, ModelSplit, model_params

TINY = ModelShape("tiny", 2, 24, 4, 2, 6, 20, 50, vocab_multiple=1)
TINY_TIED = replace(TINY, tied=True)
TINY_MOE = replace(TINY, experts=4, ffn=10)


@pytest.mark.parametrize(
    ("name", "numel"),
    [
        ("Qwen3-0.6B", 596_049_920),
        ("Qwen3-4B", 4_022_468_096),
        ("Qwen3-30B-A3B", 30_532_122_624),
        ("Qwen3-235B-A22B", 235_093_634_560),
    ],
)
def test_presets_have_the_published_parameter_counts(name, numel):
    shapes = JobPlanner(PRESETS[name], ParallelLayout(1)).global_shapes()
    assert sum(prod(shape) for shape in shapes.values()) == numel


def test_parameters_of_a_dense_rank_in_registration_order():
    split = ModelSplit(tp=2, pp=2)
    found = list(model_params(TINY, split, tp_rank=1, pp_rank=1))
    assert [(p.name, p.global_shape, p.local_shape, p.global_offset) for p in found] == [
        ("decoder.layers.0.self_attention.linear_proj.weight", (2, 24, 24), (24, 12), (1, 0, 12)),
        ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", (2, 24), (24,), (1, 0)),
        ("decoder.layers.0.self_attention.linear_qkv.weight", (2, 48, 24), (24, 24), (1, 24, 0)),
        ("decoder.layers.0.self_attention.q_layernorm.weight", (2, 6), (6,), (1, 0)),
        ("decoder.layers.0.self_attention.k_layernorm.weight", (2, 6), (6,), (1, 0)),
        ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", (2, 24), (24,), (1, 0)),
        ("decoder.layers.0.mlp.linear_fc1.weight", (2, 40, 24), (20, 24), (1, 20, 0)),
        ("decoder.layers.0.mlp.linear_fc2.weight", (2, 24, 20), (24, 10), (1, 0, 10)),
        ("decoder.final_layernorm.weight", (24,), (24,), (0,)),
        ("output_layer.weight", (50, 24), (25, 24), (25, 0)),
    ]
    fc1 = found[6]
    assert fc1.targets == (
        ParamRun(
            "decoder.layers.mlp.linear_fc1.weight", (2, 40, 24), (1, 10, 0), (10, 24), 0, (0, 0, 0)
        ),
        ParamRun(
            "decoder.layers.mlp.linear_fc1.weight",
            (2, 40, 24),
            (1, 30, 0),
            (10, 24),
            240,
            (0, 0, 0),
        ),
    )
    assert found[1].targets[0].replica_id == (0, 1, 0)  # whole on both TP ranks
    assert not any(p.is_expert or p.shared_embedding for p in found)


def test_parameters_of_experts():
    split = ModelSplit(tp=1, ep=2, etp=2)
    found = [p for p in model_params(TINY_MOE, split, ep_rank=1, etp_rank=1) if p.is_expert]
    names = [
        f"decoder.layers.{n}.mlp.experts.linear_fc{f}.weight{e}"
        for n in (0, 1)
        for f in (1, 2)
        for e in (0, 1)
    ]
    assert [p.name for p in found] == names
    first, last = found[0], found[-1]
    assert (first.global_shape, first.local_shape) == ((2, 4, 20, 24), (10, 24))
    assert [t.global_offset for t in first.targets] == [(0, 2, 5, 0), (0, 2, 15, 0)]
    assert (last.global_shape, last.local_shape) == ((2, 4, 24, 10), (24, 5))
    assert last.global_offset == (1, 3, 0, 5)
    local = replace(TINY_MOE, fused_norms=False, homogeneous_layers=False)
    found = [p for p in model_params(local, split, ep_rank=1) if p.is_expert]
    assert found[1].name == "decoder.layers.0.mlp.experts.local_experts.0.linear_fc2.weight"
    assert found[1].targets[0].key == "decoder.layers.0.mlp.experts.experts.linear_fc2.weight"
    assert found[1].global_shape == (4, 24, 10)
    # The local spec renames the norm before the experts in the checkpoint; the TE spec does not.
    for shape, key in (
        (local, "decoder.layers.0.mlp.linear_fc1.layer_norm_weight"),
        (TINY_MOE, "decoder.layers.pre_mlp_layernorm.weight"),
    ):
        norms = {p.name: p.targets[0].key for p in model_params(shape, split)}
        assert norms["decoder.layers.0.pre_mlp_layernorm.weight"] == key
    # Megatron keeps experts in the dense buffers where EP is 1.
    assert not any(p.is_expert for p in model_params(TINY_MOE, ModelSplit()))


def test_tied_embedding_is_shared_between_stages_and_stored_once():
    last = list(model_params(TINY_TIED, ModelSplit(tp=2, pp=2), tp_rank=1, pp_rank=1))[-1]
    assert (last.name, last.shared_embedding) == ("output_layer.weight", True)
    assert last.targets[0].key == "embedding.word_embeddings.weight"
    assert last.targets[0].replica_id == (1, 0, 0)
    first = next(model_params(TINY_TIED, ModelSplit(tp=2, pp=2)))
    assert (first.shared_embedding, first.targets[0].replica_id) == (True, (0, 0, 0))
    names = [p.name for p in model_params(TINY_TIED, ModelSplit())]
    assert "output_layer.weight" not in names


def test_layers_that_do_not_divide_leave_fewer_to_the_last_stage():
    big = PRESETS["Qwen3-235B-A22B"]
    assert ModelSplit(pp=8).stage_layers(big) == (12,) * 7 + (10,)
    assert ModelSplit(pp=4, last_stage_layers=19).stage_layers(big) == (25, 25, 25, 19)
    for split in (ModelSplit(pp=64), ModelSplit(pp=4, last_stage_layers=20)):
        with pytest.raises(PlanError, match="94 layers"):
            split.stage_layers(big)


@pytest.mark.parametrize(
    ("shape", "split"),
    [
        (TINY, ModelSplit(tp=4)),
        (TINY, ModelSplit(ep=2)),
        (TINY_MOE, ModelSplit(ep=3)),
        (TINY_MOE, ModelSplit(ep=2, etp=4)),
        (TINY_MOE, ModelSplit(tp=2, ep=1, etp=1)),
    ],
)
def test_impossible_splits_are_refused(shape, split):
    with pytest.raises(PlanError):
        split.check(shape)

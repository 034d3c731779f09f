"""Model shapes and the parameters that Megatron builds from them on each rank, without a model.

Covers decoder-only GPT models with grouped-query attention, SwiGLU and RMSNorm, dense or with
experts in every layer. Names, keys, cuts and registration order are those of megatron-core 0.16.1
(gpt_model, attention, mlp, moe/experts, and their sharded_state_dict methods).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vime_optim.errors import PlanError
from vime_optim.files.geometry import round_up
from vime_optim.reshard.plan import ParamRun

EMBEDDING_KEY = "embedding.word_embeddings.weight"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What decides the parameters of a model; counts and lengths in elements.

    Attributes:
        ffn: hidden length of the MLP, or of one expert where there are experts.
        experts: experts per layer; 0 for a dense model.
        tied: whether the output layer shares the embedding's weight.
        qk_norm: whether queries and keys are normalised per head.
        vocab_multiple: the vocabulary is padded to a multiple of this times TP, as
            --make-vocab-size-divisible-by does.
        fused_norms: whether a norm before a linear layer is part of it (Transformer Engine's spec,
            experts in a grouped MLP) or a module of its own (the local spec, sequential experts).
            It decides the order of registration, and so that of the buffers.
        homogeneous_layers: whether a layer is an axis of the checkpoint's tensors, or a key.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_groups: int
    head_dim: int
    ffn: int
    vocab: int
    experts: int = 0
    tied: bool = False
    qk_norm: bool = True
    vocab_multiple: int = 128
    fused_norms: bool = True
    homogeneous_layers: bool = True

    def padded_vocab(self, tp: int) -> int:
        """Vocabulary after padding for `tp` tensor-parallel ranks."""
        return round_up(self.vocab, self.vocab_multiple * tp)


def _qwen3(
    name: str, layers: int, hidden: int, heads: int, kv: int, ffn: int, **rest: object
) -> ModelShape:
    return ModelShape(name, layers, hidden, heads, kv, 128, ffn, 151936, **rest)  # type: ignore[arg-type]


# Source: the models' public config.json files.
PRESETS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _qwen3("Qwen3-0.6B", 28, 1024, 16, 8, 3072, tied=True),
        _qwen3("Qwen3-4B", 36, 2560, 32, 8, 9728, tied=True),
        _qwen3("Qwen3-30B-A3B", 48, 2048, 32, 4, 768, experts=128),
        _qwen3("Qwen3-235B-A22B", 94, 4096, 64, 4, 1536, experts=128),
    )
}


@dataclass(frozen=True, slots=True)
class ModelParam:
    """One parameter as a rank holds it.

    Attributes:
        name: as in named_parameters() of the rank's model; layers counted within the stage.
        global_shape: shape of the whole tensor in the checkpoint, prepended axes included.
        local_shape: shape of the rank's parameter.
        global_offset: where the rank's part lies, before a factory rearranges it.
        is_expert: whether it lies in the expert buffers, over the expert data-parallel group.
        shared_embedding: whether it takes a bucket of its own (tied weights with PP > 1).
        targets: where its elements lie in the checkpoint; two for SwiGLU's gate and up halves.
    """

    name: str
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    is_expert: bool
    shared_embedding: bool
    targets: tuple[ParamRun, ...]


@dataclass(frozen=True, slots=True)
class ModelSplit:
    """How a model is divided: tensor, pipeline, expert and expert-tensor parallel sizes."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    last_stage_layers: int | None = None

    def check(self, shape: ModelShape) -> None:
        """Raises PlanError where Megatron could not divide the model this way."""
        for what, total, parts in (
            ("heads", shape.heads, self.tp),
            ("KV groups", shape.kv_groups, self.tp),
            ("experts", shape.experts, self.ep),
            ("the FFN length", shape.ffn, self.etp if shape.experts else self.tp),
        ):
            if parts < 1 or total % parts:
                raise PlanError(
                    f"{shape.name}: {what} cannot be divided",
                    got=f"{total} over {parts}",
                    expected="a size that divides it",
                )
        if not shape.experts and self.ep > 1:
            raise PlanError(f"{shape.name} has no experts", got=f"EP={self.ep}", expected="EP=1")
        if shape.experts and self.ep == 1 and self.etp != self.tp:
            raise PlanError(
                "Megatron keeps experts in the dense buffers where EP is 1",
                got=f"ETP={self.etp}, TP={self.tp}",
                expected="ETP equal to TP, or EP above 1",
            )
        self.stage_layers(shape)

    def stage_layers(self, shape: ModelShape) -> tuple[int, ...]:
        """Layers of each pipeline stage; where they do not divide, the last stage takes fewer."""
        last = self.last_stage_layers
        if last is None:
            each = -(-shape.layers // self.pp)
            last = shape.layers - each * (self.pp - 1)
        else:
            each, rest = divmod(shape.layers - last, self.pp - 1) if self.pp > 1 else (last, 0)
            if rest or each < 1 or (self.pp == 1 and last != shape.layers):
                last = 0
        if last < 1:
            raise PlanError(
                f"{shape.name}: {shape.layers} layers cannot be divided over {self.pp} stages",
                got=f"{self.last_stage_layers or 'no given'} layers on the last stage",
                next_step="Choose another PP, or the number of layers on the last stage",
            )
        return (each,) * (self.pp - 1) + (last,)


def model_params(
    shape: ModelShape,
    split: ModelSplit,
    *,
    tp_rank: int = 0,
    pp_rank: int = 0,
    ep_rank: int = 0,
    etp_rank: int = 0,
) -> Iterator[ModelParam]:
    """The parameters of one rank, in the order in which Megatron registers them."""
    build = _Builder(shape, split, tp_rank, pp_rank, ep_rank, etp_rank)
    stages = split.stage_layers(shape)
    first_layer = sum(stages[:pp_rank])
    vocab = shape.padded_vocab(split.tp)
    shared = shape.tied and split.pp > 1
    if pp_rank == 0:
        yield build.tensor("", EMBEDDING_KEY, (vocab, shape.hidden), cut=0, shared=shared)
    for index in range(stages[pp_rank]):
        yield from build.layer(index, first_layer + index)
    if pp_rank == split.pp - 1:
        yield build.tensor("decoder.", "final_layernorm.weight", (shape.hidden,))
        if not shape.tied:
            yield build.tensor("", "output_layer.weight", (vocab, shape.hidden), cut=0)
        elif shared:  # a copy of the embedding, stored under its key by the first stage alone
            yield build.tensor(
                "",
                EMBEDDING_KEY,
                (vocab, shape.hidden),
                cut=0,
                shared=True,
                name="output_layer.weight",
            )


@dataclass(frozen=True, slots=True)
class _Builder:
    shape: ModelShape
    split: ModelSplit
    tp_rank: int
    pp_rank: int
    ep_rank: int
    etp_rank: int

    def layer(self, index: int, layer: int) -> Iterator[ModelParam]:
        """Parameters of one layer: `index` within the stage, `layer` within the model."""
        s = self.shape
        name = f"decoder.layers.{index}."
        qkv = (s.heads + 2 * s.kv_groups) * s.head_dim

        def one(
            key: str, full: tuple[int, ...], cut: int | None = None, **rest: object
        ) -> ModelParam:
            return self.tensor(name, key, full, cut=cut, layer=layer, **rest)  # type: ignore[arg-type]

        attention_norm = "self_attention.linear_qkv.layer_norm_weight"
        if not s.fused_norms:
            yield one(attention_norm, (s.hidden,), name="input_layernorm.weight")
        yield one("self_attention.linear_proj.weight", (s.hidden, s.heads * s.head_dim), 1)
        if s.fused_norms:
            yield one(attention_norm, (s.hidden,))
        yield one("self_attention.linear_qkv.weight", (qkv, s.hidden), 0)
        if s.qk_norm:
            yield one("self_attention.q_layernorm.weight", (s.head_dim,))
            yield one("self_attention.k_layernorm.weight", (s.head_dim,))
        # The local spec stores this norm under the fused one's key, also before experts.
        mlp_norm = "mlp.linear_fc1.layer_norm_weight"
        if s.experts:
            norm = "pre_mlp_layernorm.weight"
            yield one(norm if s.fused_norms else mlp_norm, (s.hidden,), name=norm)
            yield one("mlp.router.weight", (s.experts, s.hidden))
            yield from self.experts(name, layer)
            return
        norm_name = None if s.fused_norms else "pre_mlp_layernorm.weight"
        yield one(mlp_norm, (s.hidden,), name=norm_name)
        yield one("mlp.linear_fc1.weight", (2 * s.ffn, s.hidden), 0, gated=True)
        yield one("mlp.linear_fc2.weight", (s.hidden, s.ffn), 1)

    def experts(self, name: str, layer: int) -> Iterator[ModelParam]:
        """Weights of the rank's experts in one layer: grouped by linear layer, or by expert."""
        s = self.shape
        count = s.experts // self.split.ep
        numbers = range(count)
        if s.fused_norms:
            order = [(fc, e) for fc in (1, 2) for e in numbers]
        else:
            order = [(fc, e) for e in numbers for fc in (1, 2)]
        for fc, expert in order:
            if s.fused_norms:
                own = f"mlp.experts.linear_fc{fc}.weight{expert}"
            else:
                own = f"mlp.experts.local_experts.{expert}.linear_fc{fc}.weight"
            yield self.tensor(
                name,
                f"mlp.experts.experts.linear_fc{fc}.weight",
                (2 * s.ffn, s.hidden) if fc == 1 else (s.hidden, s.ffn),
                cut=fc - 1,
                layer=layer,
                expert=self.ep_rank * count + expert,
                gated=fc == 1,
                name=own,
            )

    def tensor(
        self,
        prefix: str,
        key: str,
        full: tuple[int, ...],
        *,
        cut: int | None = None,
        layer: int | None = None,
        expert: int | None = None,
        gated: bool = False,
        shared: bool = False,
        name: str | None = None,
    ) -> ModelParam:
        """A parameter of the whole shape `full`, cut along axis `cut` over its TP group."""
        s = self.shape
        of_expert = expert is not None
        parts = self.split.etp if of_expert else self.split.tp
        part = self.etp_rank if of_expert else self.tp_rank
        local, offset = list(full), [0] * len(full)
        if cut is not None:
            local[cut] //= parts
            offset[cut] = part * local[cut]
        lead_shape: tuple[int, ...] = ()
        lead_offset: tuple[int, ...] = ()
        full_key = f"{prefix}{key}"
        if layer is not None:
            full_key = (
                f"decoder.layers.{key}" if s.homogeneous_layers else f"decoder.layers.{layer}.{key}"
            )
            if s.homogeneous_layers:
                lead_shape, lead_offset = (s.layers,), (layer,)
        if expert is not None:
            lead_shape, lead_offset = (*lead_shape, s.experts), (*lead_offset, expert)
        # Replicas: the last stage's copy of the embedding, and what every TP rank holds whole.
        copy = int(shared and self.pp_rank > 0)
        replica = (copy, part if cut is None else 0, 0)
        global_shape, global_offset = lead_shape + full, lead_offset + tuple(offset)
        whole = ParamRun(full_key, global_shape, global_offset, tuple(local), 0, replica)
        return ModelParam(
            name=f"{prefix}{name or key}",
            global_shape=global_shape,
            local_shape=whole.local_shape,
            global_offset=global_offset,
            is_expert=of_expert and self.split.ep > 1,
            shared_embedding=shared,
            targets=_gate_and_up(whole, part, len(lead_shape)) if gated else (whole,),
        )


def _gate_and_up(whole: ParamRun, part: int, axis: int) -> tuple[ParamRun, ParamRun]:
    """SwiGLU's halves: all ranks' gate rows come first in the checkpoint, then all up rows."""
    rows = whole.local_shape[0] // 2
    local = (rows, *whole.local_shape[1:])
    lead, tail = whole.global_offset[:axis], whole.global_offset[axis + 1 :]
    halves = []
    for half in (0, 1):
        first_row = half * whole.global_shape[axis] // 2 + part * rows
        halves.append(
            ParamRun(
                whole.key,
                whole.global_shape,
                (*lead, first_row, *tail),
                local,
                half * rows * whole.local_shape[1],
                whole.replica_id,
            )
        )
    return halves[0], halves[1]

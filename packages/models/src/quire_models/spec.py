"""A network as data: norms, layers, embedding, head, and how its checkpoint names them. Free of torch.

A family's `spec` describes its network with these records, in the words of its paper. The planner sums their weights,
KV cache groups are mapped from their mixers, and `build.py` makes modules of them. Mixers stand in `mixer_spec.py`,
feed-forward networks in `feed_forward_spec.py`.

A record's `weights` names every parameter that the checkpoint has to bring, relative to the record's parent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

from quire_interfaces import KVCacheSpec, StateTensor
from quire_models.rope_config import RopeConfig
from quire_models.shards import OutputShard
from quire_pooling.spec import PoolerSpec

__all__ = [
    "CheckpointNames",
    "ConditionedNormSpec",
    "EmbeddingSpec",
    "FeedForwardSpec",
    "FusedRows",
    "HeadSpec",
    "LayerSpec",
    "LinearSpec",
    "MixerSpec",
    "NetworkSpec",
    "NormSpec",
    "PositionSpec",
    "SampleConvolution",
    "StateInputs",
    "Weight",
    "inside",
    "max_sound_samples",
    "num_sound_tokens",
    "recast",
    "within",
]

ANY_EXPERT = "*"
"""In a weight's name: the number of the expert, for weights that all experts of a layer have."""

Record = TypeVar("Record")


class Weight(NamedTuple):
    """A parameter of the checkpoint."""

    name: str
    shape: tuple[int, ...]
    part: str
    """Row of the memory ledger that counts it: "attention", "MLP", "norms", ..."""
    is_linear: bool = False
    """A linear method may keep it in another form than the compute dtype."""
    is_wide: bool = False
    """It is kept in float32."""
    is_buffer: bool = False
    """The checkpoint has it beside the network's parameters: it is loaded, and counted nowhere."""
    num_experts: int = 1
    """Experts that have such a weight each; their number in the name is `ANY_EXPERT`."""
    is_whole: bool = False
    """A tensor-parallel rank has it as it is here: replicated, or cut already."""
    is_float8: bool = False
    """It stays in FP8, as the quantized checkpoint has it."""


def inside(name: str, weights: Iterable[Weight]) -> Iterator[Weight]:
    """Weights of a part, renamed to be relative to the parent of the part."""
    prefix = f"{name}." if name else ""
    return (weight._replace(name=prefix + weight.name) for weight in weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec:
    """A linear layer: weight [out_features, in_features], bias [out_features]."""

    name: str
    in_features: int
    out_features: int
    bias: bool = False
    is_plain: bool = False
    """Its weight stays in the compute dtype whatever the linear method is."""
    shard: OutputShard | None = None
    """The outputs of this rank, where the layer behind it takes no others; None for all."""

    def weights(self, part: str) -> Iterator[Weight]:
        """The weight, and the bias if it has one, for this row of the ledger."""
        outputs = self.out_features if self.shard is None else self.shard.size
        is_cut = self.shard is not None
        shape = (outputs, self.in_features)
        yield Weight(f"{self.name}.weight", shape, part, is_linear=not self.is_plain, is_whole=is_cut)
        if self.bias:
            yield Weight(f"{self.name}.bias", (outputs,), part)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """A norm over the last dimension, or over the dimensions of attention heads."""

    name: str
    size: int
    """Numbers that are normalised together."""
    eps: float
    kind: Literal["rms", "layer"] = "rms"
    has_weight: bool = True
    has_bias: bool = False
    offset: float = 0.0
    """Number that is added to the stored weight (Gemma, Nemotron)."""
    num_heads: int = 0
    """Heads that have a weight of their own each; 0 for one weight that all share."""
    is_listed: bool = False
    """Those weights are one tensor per head (StableLM), not one tensor."""
    over_heads: bool = False
    """All heads of a token are normalised together (OLMo 2); `size` is their total width."""
    built_by: ClassVar[str] = ""
    """"module:class" of a family whose norm is its own; empty for the shared ones."""

    def weights(self) -> Iterator[Weight]:
        """Weight and bias, as far as there are any."""
        if self.has_weight and self.is_listed:
            for head in range(self.num_heads):
                yield Weight(f"{self.name}.norms.{head}.weight", (self.size,), "norms")
        elif self.has_weight:
            shape = (self.num_heads, self.size) if self.num_heads else (self.size,)
            yield Weight(f"{self.name}.weight", shape, "norms")
        if self.has_bias:
            yield Weight(f"{self.name}.bias", (self.size,), "norms")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionedNormSpec(NormSpec):
    """An RMS norm whose weight has the factor 1 + W2 gelu(W1 t), where t are cosines and sines of a number (adaptive
    normalization, Peebles & Xie 2023, sec. 3.2; here the delay of Voxtral Realtime)."""

    condition: int
    """The number, the same for all tokens."""
    condition_name: str
    """Module within the layer that has W1 and W2: linear1 and linear2."""
    condition_size: int
    """Rows of W1."""

    def weights(self) -> Iterator[Weight]:
        """Those of the norm, W1 and W2."""
        yield from NormSpec.weights(self)
        yield Weight(f"{self.condition_name}.linear1.weight", (self.condition_size, self.size), "norms")
        yield Weight(f"{self.condition_name}.linear2.weight", (self.size, self.condition_size), "norms")


class StateInputs(NamedTuple):
    """What ops with states are given of a token."""

    numbers: int
    """In the compute dtype."""
    wide: int = 0
    """In float32."""


class MixerSpec(Protocol):
    """What mixes the tokens of a sequence in a layer."""

    @property
    def name(self) -> str:
        """Name within the layer."""

    @property
    def width(self) -> int:
        """Numbers that it keeps per token while it runs, beside queries, keys and values; float32 counts twice."""

    @property
    def states(self) -> tuple[StateTensor, ...]:
        """Tensors that it keeps of each sequence; none for attention, which keeps keys and values."""

    def weights(self) -> Iterator[Weight]:
        """Its parameters."""

    def cache(self, block_size: int, dtype: str) -> KVCacheSpec:
        """What it keeps per block of `block_size` tokens, keys and values in `dtype`."""


class FeedForwardSpec(Protocol):
    """What maps each token of a layer for itself."""

    @property
    def width(self) -> int:
        """Numbers that it keeps per token while it runs."""

    def weights(self) -> Iterator[Weight]:
        """Its parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """A layer: x + mixer(norm(x)), then x + feed_forward(norm(x)), with the norms that are there. Norms named "out"
    stand behind a part, before its result is added."""

    name: str
    """Full name in the checkpoint, for example "model.layers.0"."""
    mixers: tuple[MixerSpec, ...]
    """Usually one; none in a layer that is a feed-forward network alone."""
    feed_forward: FeedForwardSpec | None = None
    input_norm: NormSpec | None = None
    attention_out_norm: NormSpec | None = None
    feed_forward_norm: NormSpec | None = None
    feed_forward_out_norm: NormSpec | None = None
    residual_factor: float = 1.0
    """Factor of what both parts give, before it is added."""
    arrangement: Literal["sequential", "parallel", "post_ln"] = "sequential"
    """"parallel": x + mixer(norm(x)) + feed_forward(norm(x)), both behind `input_norm` where there is no other norm;
    "post_ln": norm(x + mixer(x)), then norm(x + feed_forward(x)), with the two out norms (Vaswani et al. 2017)."""
    built_by: ClassVar[str] = ""
    """"module:class" of a family whose layer is its own; empty for the shared ones."""

    @property
    def norms(self) -> tuple[NormSpec, ...]:
        """Its norms, in the order in which they are applied."""
        norms = (self.input_norm, self.attention_out_norm, self.feed_forward_norm, self.feed_forward_out_norm)
        return tuple(norm for norm in norms if norm is not None)

    def weights(self) -> Iterator[Weight]:
        """Parameters of all its parts, by their full names."""
        parts: list[MixerSpec | FeedForwardSpec | NormSpec] = [*self.mixers, *self.norms]
        parts += [] if self.feed_forward is None else [self.feed_forward]
        for part in parts:
            yield from inside(self.name, part.weights())


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionSpec:
    """Positions that are added to the embedding: a learned table, or sines and cosines."""

    name: str
    """Of the table; empty for sines and cosines, which are computed (XGLM)."""
    num_positions: int
    size: int
    offset: int = 0
    """Number that is added to a token's position."""
    is_scaled: bool = False
    """Sines and cosines are divided by the root of `size`, and their wavelengths end before 10000 * 2 pi (NeMo)."""

    def weights(self) -> Iterator[Weight]:
        """The table."""
        if self.name:
            yield Weight(f"{self.name}.weight", (self.num_positions + self.offset, self.size), "embedding")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingSpec:
    """Tokens -> the residual stream: table, projection, factor, token types, positions, norm, in this order."""

    name: str
    num_tokens: int
    size: int
    """Width of the table."""
    factor: float = 1.0
    is_factor_rounded: bool = False
    """The factor is rounded to the compute dtype (Gemma)."""
    scales_media: bool = False
    """Embeddings of media have the factor, too (Granite); otherwise the table's rows alone."""
    adds_media: bool = False
    """Embeddings of media are added to those of their tokens (Voxtral Realtime); otherwise they take their place."""
    project_in: LinearSpec | None = None
    """From the width of the table to the hidden size (OPT 350M)."""
    projects_last: bool = False
    """That projection stands behind the norm (ELECTRA), and not behind the table."""
    num_token_types: int = 0
    """Rows of the table of token types (BERT); 0 for no such table."""
    token_types: str = ""
    """Name of that table."""
    positions: PositionSpec | None = None
    norm: NormSpec | None = None
    norms_media: bool = True
    """The norm is of embeddings of media, too; otherwise of what tokens alone have (Inkling)."""

    def weights(self) -> Iterator[Weight]:
        """Everything but the table of tokens, which planners count by itself."""
        if self.project_in is not None:
            yield from self.project_in.weights("embedding")
        if self.num_token_types:
            yield Weight(f"{self.token_types}.weight", (self.num_token_types, self.size), "embedding")
        if self.positions is not None:
            yield from self.positions.weights()
        if self.norm is not None:
            yield from self.norm.weights()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """Hidden states -> logits: soft_cap(factor * head(project_out(hidden * hidden_factor)))."""

    name: str = "lm_head"
    """Full name in the checkpoint."""
    tied: bool = False
    """Its weight is the embedding's."""
    may_differ: bool = False
    """The checkpoint may bring a weight although config.json says that it is the embedding's (T5 1.1)."""
    bias: bool = False
    is_bias_buffer: bool = False
    """The bias is no parameter of the network (BART)."""
    hidden_factor: float = 1.0
    factor: float = 1.0
    soft_cap: float | None = None
    """c in logit -> c * tanh(logit / c)."""
    project_out: LinearSpec | None = None
    """From the hidden size to the width of the embedding (OPT 350M)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedRows:
    """A matrix of the checkpoint that is several linear layers, stacked along its outputs."""

    module: str
    """End of its name: "self_attn.qkv_proj"."""
    parts: tuple[tuple[str, int], ...]
    """(name, outputs) of each layer, in the order in which they are stored."""
    groups: int = 1
    """The rows of each layer come in so many pieces, by turns: head by head, for example."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointNames:
    """How the tensors of a checkpoint differ from the network's weights. Applied in the order of the fields."""

    removed_prefixes: tuple[str, ...] = ()
    """Taken off names that begin with one of them: a class with a head calls its body by a name ("bert."), the body
    alone does not."""
    ignored_prefixes: tuple[str, ...] = ()
    ignored_suffixes: tuple[str, ...] = ()
    """Tensors that are not loaded."""
    default_prefix: str = ""
    """Put before names that begin with neither it nor a head's: checkpoints of a body alone leave it out."""
    renamed: tuple[tuple[str, str], ...] = ()
    """(part of a name, what the network calls it)."""
    transposed: tuple[str, ...] = ()
    """Ends of names of matrices that are stored [inputs, outputs]."""
    squeezed: tuple[str, ...] = ()
    """Names of vectors that are stored as one row."""
    first_rows: tuple[tuple[str, int], ...] = ()
    """(name, rows): tensors that may have further rows behind these, which are not loaded."""
    fused: tuple[FusedRows, ...] = ()

    def rename(self, name: str) -> str:
        """A tensor's name by `renamed` alone."""
        for old, new in self.renamed:
            name = name.replace(old, new)
        return name


class SampleConvolution(NamedTuple):
    """A convolution over time."""

    width: int
    stride: int
    padding: int = 0
    """Zeros before and behind its input together."""


def num_sound_tokens(convolutions: Sequence[SampleConvolution], num_samples: int) -> int:
    """Tokens that convolutions make of a sound; 0 where it is too short for any."""
    count = num_samples
    for each in convolutions:
        count = max(0, (count + each.padding - each.width) // each.stride + 1)
    return count


def max_sound_samples(convolutions: Sequence[SampleConvolution], num_tokens: int) -> int:
    """Samples of the longest sound that convolutions make so many tokens of."""
    count = num_tokens
    for each in reversed(convolutions):
        count = count * each.stride + each.width - each.padding - 1
    return count


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSpec:
    """A decoder: embedding, layers, a norm, a head. Encoders, alone or beside a decoder, are in `encoder_spec.py`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Width of a feed-forward network, as config.json names it; 0 for none."""
    max_model_len: int
    """Tokens of context, rope scaling included."""
    body: str = "model"
    """Prefix of embedding, layers and final norm."""
    embedding: EmbeddingSpec
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec | None
    head: HeadSpec
    checkpoint: CheckpointNames = CheckpointNames()
    notes: tuple[str, ...] = ()
    """What the checkpoint says and the network does not do, for the report at the start."""
    num_mtp_layers: int = 0
    """Layers of the checkpoint that predict further tokens (multi-token prediction); a drafting head loads them."""
    mtp_feed_forward: FeedForwardSpec | None = None
    """The feed-forward network of these layers, where the family says it; None where it is that of the last layer with
    experts, or of any."""
    has_positions_without_end: bool = False
    """Positions are distances only: `max_model_len` is what it was trained for, and it runs beyond."""
    max_encoder_len: int = 0
    """Most tokens that its encoder reads; 0 for a network without one."""
    decoder_start_token_ids: tuple[int, ...] = ()
    """What the decoder of a network with an encoder begins with."""
    has_lm_head: bool = True
    """It computes logits of next tokens; otherwise hidden states are all that it gives."""
    pooler: PoolerSpec | None = field(default=None, hash=False)
    """What its checkpoint makes of hidden states, in place of next tokens: classes, scores, rewards, weights of words;
    None for a network without such a head."""
    num_mel_bins: int = 0
    """Height of the spectrograms that its encoder reads; 0 where it reads tokens, or there is none."""
    sound_convolutions: tuple[SampleConvolution, ...] = ()
    """What makes tokens of the samples, or frames, that its encoder reads, from the first; empty for neither."""
    sound_bins: int = 0
    """Mel bins of these frames, each scaled by all of a sound; 0 where the encoder reads samples."""
    sound_width: int = 0
    """Most numbers alive per token of a sound while `sound_convolutions` read it, which they do one sound at a time."""
    is_encoder: ClassVar[bool] = False
    """It reads whole texts, in both directions, and keeps no cache."""
    shares_heads: ClassVar[bool] = True
    """Tensor-parallel ranks share out the heads of its attention, where these have a rule."""
    last_stage_embeds: bool = False
    """Cut into pipeline stages, the last one has the table of tokens, too: a head that drafts there reads it."""
    caches_by_mixer: bool = False
    """Caches are named after mixers, for layers with several or none: "model.layers.0.mamba"; else numbered."""
    brings_code: ClassVar[bool] = False
    """Its code comes with the checkpoint."""
    has_one_stream: ClassVar[bool] = True
    """Between its layers there is one residual stream, which drafters can read."""
    built_by: ClassVar[str] = "quire_models.layers.decoder_lm:DecoderLM"
    """"module:class" of the network that is made of it."""

    @property
    def is_first(self) -> bool:
        """It embeds the tokens, and has the towers: it is the whole network, or its first pipeline stage."""
        return True

    @property
    def is_last(self) -> bool:
        """It computes the hidden states that logits and outputs of poolers are made of."""
        return True

    @property
    def mixers(self) -> tuple[MixerSpec, ...]:
        """The mixers of all layers, in the order in which a batch counts their caches."""
        return tuple(mixer for layer in self.layers for mixer in layer.mixers)

    @property
    def attention(self) -> Any:
        """The first mixer with heads that attend; None in a network without attention."""
        return next((mixer for mixer in self.mixers if not mixer.states), None)

    @property
    def inner_width(self) -> int:
        """Most numbers that a part of a layer keeps per token while it runs."""
        parts = (*self.mixers, *(layer.feed_forward for layer in self.layers))
        return max(3 * self.intermediate_size, *(part.width for part in parts if part is not None))

    @property
    def score_copies(self) -> int:
        """Most numbers of float32 that a mixer keeps for each score; 0 where none has its scores in memory."""
        return max((getattr(mixer, "score_copies", 0) for mixer in self.mixers), default=0)

    def weights(self) -> Iterator[Weight]:
        """All parameters by their full names, but the tables of embedding and head."""
        yield from inside(self.body, self.embedding.weights())
        for layer in self.layers:
            yield from layer.weights()
        if self.final_norm is not None:
            yield from inside(self.body, self.final_norm.weights())
        if self.head.bias and self.has_lm_head:
            yield Weight(f"{self.head.name}.bias", (self.vocab_size,), "LM head", is_buffer=self.head.is_bias_buffer)
        if self.head.project_out is not None:
            yield from inside(self.body, self.head.project_out.weights("LM head"))
        for name, shape in self.head_shapes().items():
            yield Weight(name, shape, "pooling head", is_wide=True)

    @property
    def embedding_name(self) -> str:
        """Full name of the table of tokens."""
        return ".".join(filter(None, (self.body, self.embedding.name, "weight")))

    def head_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the tensors of its pooler, but the table of tokens where the pooler shares it."""
        shapes = {} if self.pooler is None else self.pooler.shapes()
        shapes.pop(self.embedding_name, None)
        return shapes

    def state_input_bytes(self, dtype_bytes: int) -> int:
        """Bytes that all ops with states are given of a token, an upper bound; none in a network without states.

        Args:
            dtype_bytes: Of a number of the compute dtype.
        """
        inputs = [getattr(mixer, "state_inputs", None) for mixer in self.mixers]
        return sum(each.numbers * dtype_bytes + each.wide * 4 for each in inputs if each is not None)

    def cache_names(self) -> tuple[str, ...]:
        """Name of each mixer's cache, as `mixers` lists them."""
        if self.caches_by_mixer:
            names = ((layer.name, mixer.name.rpartition(".")[2]) for layer in self.layers for mixer in layer.mixers)
            return tuple(".".join(filter(None, parts)) for parts in names)
        return tuple(f"model.layers.{i}" for i in range(len(self.mixers)))

    def kv_cache_specs(self, block_size: int, dtype: str) -> dict[str, KVCacheSpec]:
        """Cache name -> what the mixer keeps per block, in the order of the layers.

        Args:
            dtype: What keys and values are kept in: a name of `quire_interfaces.KV_CACHE_DTYPES`.

        Raises:
            ConfigError: A mixer does not keep keys and values in that.
        """
        return dict(zip(self.cache_names(), (mixer.cache(block_size, dtype) for mixer in self.mixers), strict=True))


def recast(kind: Callable[..., Record], record: Any, **fields: Any) -> Record:
    """A record of another kind, with the fields of this one; `fields` are what the kind has besides."""
    return kind(**{field.name: getattr(record, field.name) for field in dataclasses.fields(record)}, **fields)


def within(record: Record, max_model_len: int) -> Record:
    """The record with its rotations as an engine needs them whose sequences have at most so many tokens; see
    `RopeConfig.within`. Records without a rotation come back as they are."""
    if isinstance(record, RopeConfig):
        return record.within(max_model_len)  # type: ignore[return-value]  # of the same class
    if isinstance(record, tuple) and type(record) is tuple:
        items = tuple(within(item, max_model_len) for item in record)
        return record if all(a is b for a, b in zip(items, record, strict=True)) else items  # type: ignore[return-value]  # of the same class
    if not dataclasses.is_dataclass(record) or isinstance(record, type):
        return record
    values = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    changed = {name: within(value, max_model_len) for name, value in values.items()}
    changed = {name: value for name, value in changed.items() if value is not values[name]}
    return dataclasses.replace(record, **changed) if changed else record

"""What mixes the tokens of a sequence, as data: attention of two kinds, and recurrent mixers. Free of torch.

Every record is a `MixerSpec` (`spec.py`): it names its weights, and says what it keeps of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from quire_interfaces import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    KVCacheSpec,
    LatentAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    StateTensor,
)
from quire_models.rope_config import RopeConfig
from quire_models.shards import HeadShard, OutputShard
from quire_models.spec import LinearSpec, NormSpec, StateInputs, Weight, inside

__all__ = [
    "BART_NAMES",
    "AlibiSpec",
    "GatedDeltaSpec",
    "IndexerSpec",
    "LatentSelfAttentionSpec",
    "Mamba1Spec",
    "Mamba2Spec",
    "ProjectionNames",
    "QueryGrowthSpec",
    "RecurrentSpec",
    "SelfAttentionSpec",
    "ShortConvSpec",
]

LATENT_NORM_EPS = 1e-6
"""Whatever config.json says of the other norms: published networks have no setting for it."""


class ProjectionNames(NamedTuple):
    """Names of an attention's projections in the checkpoint."""

    query: str = "q_proj"
    key: str = "k_proj"
    value: str = "v_proj"
    out: str = "o_proj"


LLAMA_NAMES = ProjectionNames()
BART_NAMES = ProjectionNames(out="out_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlibiSpec:
    """Slopes of attention with linear biases (Press et al. 2022)."""

    kind: Literal["bloom", "mpt"]
    """How heads share out powers of two where their number is none."""
    bias_max: float = 8.0
    """Exponent of the flattest slope."""
    factor: float = 1.0
    is_bfloat16: bool = False
    """Slopes are rounded to bfloat16 before the factor (Falcon)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryGrowthSpec:
    """Factor of a query at position p: 1 + scale * log(1 + (p + offset) // step) (Nakanishi 2025)."""

    scale: float
    step: int
    max_positions: int
    """Every position is below it."""
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfAttentionSpec:
    """Causal self-attention of grouped queries over a paged cache."""

    name: str = "self_attn"
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    in_features: int = 0
    """Width of the input; 0 for the hidden size."""
    names: ProjectionNames = LLAMA_NAMES
    qkv_bias: bool = False
    out_bias: bool = False
    unbiased: tuple[str, ...] = ()
    """Names of projections without a bias whatever these say."""
    scale: float
    """Factor of the scores."""
    rope: RopeConfig | None = None
    """None where positions do not come by rotation."""
    rotary_dim: int = 0
    """Dimensions of a head that are rotated, from the first."""
    interleaved: bool = False
    """Neighbours are the pairs that are rotated (2i, 2i + 1), not (i, i + rotary_dim / 2)."""
    sliding_window: int | None = None
    chunk_tokens: int | None = None
    """Tokens attend to those of their chunk only (Llama 4)."""
    soft_cap: float | None = None
    """c in score -> c * tanh(score / c)."""
    clip: float | None = None
    """Queries, keys and values are kept within this distance from zero."""
    q_norm: NormSpec | None = None
    k_norm: NormSpec | None = None
    norm_after_rotation: bool = False
    key_factor: float = 1.0
    """Factor of the keys before they are rotated (Falcon H1)."""
    alibi: AlibiSpec | None = None
    query_growth: QueryGrowthSpec | None = None
    sinks: bool = False
    """Each head has a learned score that takes attention and gives nothing (gpt-oss)."""
    built_by: ClassVar[str] = ""
    """"module:class" of a family whose attention is its own; empty for the shared one."""
    score_copies: ClassVar[int] = 0
    """Numbers of float32 for each score, where only torch computes its attention, with the scores in memory; of
    `ATTENTION_WORKSPACE` scores at once."""
    gated: bool = False
    """The query projection brings a gate of the result beside each head's query (Qiu et al. 2025)."""
    heads: HeadShard | None = None
    """Which heads `num_heads` and `num_kv_heads` count, of a tensor-parallel rank; None where they are all."""
    dcp_size: int = 1
    """Ranks that its cache's tokens are interleaved over (decode context parallel)."""

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def width(self) -> int:
        return 0

    @property
    def states(self) -> tuple[StateTensor, ...]:
        return ()

    def projections(self) -> tuple[LinearSpec, LinearSpec, LinearSpec, LinearSpec]:
        """Queries, keys, values, output."""
        inputs, names, size = self.in_features or self.hidden_size, self.names, self.head_dim
        heads, query_width = self.heads, size * (2 if self.gated else 1)
        query = None if heads is None else heads.queries(query_width)
        keys = None if heads is None else heads.keys(size)

        def of_input(name: str, num_heads: int, width: int, shard: OutputShard | None) -> LinearSpec:
            outputs = num_heads * width if shard is None else shard.total
            has_bias = self.qkv_bias and name not in self.unbiased
            return LinearSpec(name=name, in_features=inputs, out_features=outputs, bias=has_bias, shard=shard)

        attended = (self.num_heads if heads is None else heads.num_heads) * size
        return (
            of_input(names.query, self.num_heads, query_width, query),
            of_input(names.key, self.num_kv_heads, size, keys),
            of_input(names.value, self.num_kv_heads, size, keys),
            LinearSpec(name=names.out, in_features=attended, out_features=self.hidden_size, bias=self.out_bias),
        )

    def weights(self) -> Iterator[Weight]:
        for linear in self.projections():
            yield from inside(self.name, linear.weights("attention"))
        for norm in (self.q_norm, self.k_norm):
            yield from inside(self.name, norm.weights() if norm is not None else ())
        if self.sinks:
            yield Weight(f"{self.name}.sinks", (self.num_heads,), "attention")

    def cache(self, block_size: int, dtype: str) -> KVCacheSpec:
        size = {"block_size": block_size, "num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim}
        if self.chunk_tokens is not None:
            return ChunkedLocalSpec(**size, dtype=dtype, chunk_tokens=self.chunk_tokens)
        if self.sliding_window is not None:
            return SlidingWindowSpec(**size, dtype=dtype, sliding_window=self.sliding_window)
        return FullAttentionSpec(**size, dtype=dtype, dcp_size=self.dcp_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerSpec:
    """Lightning indexer (DeepSeek-V3.2): which tokens an attention reads."""

    num_heads: int
    head_dim: int
    topk: int
    """Tokens that a token attends to at most."""
    interleaved: bool
    """Of its heads, neighbouring dimensions are rotated as pairs, not halves."""
    is_shared: bool = False
    """The layer has none of its own, and reads what the layer before it read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSelfAttentionSpec:
    """Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, sec. 2.1): the cache keeps one latent per token, and
    one rotated key that all heads share."""

    name: str = "self_attn"
    hidden_size: int
    num_heads: int
    q_lora_rank: int | None
    """Width of the queries' latent; None where queries are projected at once."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    """Dimensions of a head without rotation."""
    rotary_dim: int
    v_head_dim: int
    scale: float
    """Factor of the scores."""
    rope: RopeConfig
    interleaved: bool
    bias: bool
    """The projections to latents, and that of the output, have a bias."""
    norm_eps: float = LATENT_NORM_EPS
    """Of the norms of latents."""
    indexer: IndexerSpec | None = None
    dcp_size: int = 1
    """Ranks that its cache's tokens are interleaved over (decode context parallel)."""
    heads: HeadShard | None = None
    """Which heads `num_heads` counts, of a tensor-parallel rank; None where they are all. Each rank has all latents."""
    built_by: ClassVar[str] = ""
    """"module:class" of a family whose attention is its own; empty for the shared one."""

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def head_dim(self) -> int:
        """Dimensions of a key."""
        return self.qk_nope_head_dim + self.rotary_dim

    @property
    def row_width(self) -> int:
        """Numbers that the cache keeps of a token: latent, rotated key, and the indexer's key."""
        return self.kv_lora_rank + self.rotary_dim + (self.indexer.head_dim if self.indexer else 0)

    @property
    def width(self) -> int:
        """Queries and what they attended to, as wide as the latent; the indexer's queries, and those in float32."""
        latents = self.num_heads * (4 * self.kv_lora_rank + 3 * self.rotary_dim)
        return latents + (4 * self.indexer.num_heads * self.indexer.head_dim if self.indexer else 0)

    @property
    def states(self) -> tuple[StateTensor, ...]:
        return ()

    def weights(self) -> Iterator[Weight]:
        yield from inside(self.name, self._weights())

    @property
    def query_up(self) -> LinearSpec:
        """From the queries' latent to the queries."""
        assert self.q_lora_rank is not None
        return self.projection("q_b_proj", self.q_lora_rank, self.head_dim)

    def projection(self, name: str, inputs: int, width: int) -> LinearSpec:
        """A linear layer with `width` outputs for each head."""
        heads, outputs = self.heads, self.num_heads * width
        shard = None if heads is None else heads.queries(width)
        return LinearSpec(name=name, in_features=inputs, out_features=shard.total if shard else outputs, shard=shard)

    @property
    def value_width(self) -> int:
        """What the heads of all ranks give together."""
        return (self.num_heads if self.heads is None else self.heads.num_heads) * self.v_head_dim

    def _weights(self) -> Iterator[Weight]:
        hidden, rank = self.hidden_size, self.kv_lora_rank

        def linear(name: str, inputs: int, outputs: int, bias: bool = False) -> Iterator[Weight]:
            spec = LinearSpec(name=name, in_features=inputs, out_features=outputs, bias=bias)
            return spec.weights("attention")

        def norm(name: str, size: int) -> Iterator[Weight]:
            return NormSpec(name=name, size=size, eps=LATENT_NORM_EPS).weights()

        if self.q_lora_rank is None:
            yield from self.projection("q_proj", hidden, self.head_dim).weights("attention")
        else:
            yield from linear("q_a_proj", hidden, self.q_lora_rank, self.bias)
            yield from norm("q_a_layernorm", self.q_lora_rank)
            yield from self.query_up.weights("attention")
        yield from linear("kv_a_proj_with_mqa", hidden, rank + self.rotary_dim, self.bias)
        yield from norm("kv_a_layernorm", rank)
        # Absorbed into queries and outputs, so that it stays as numbers whatever the linear method is.
        absorbed = self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        yield Weight("kv_b_proj.weight", (absorbed, rank), "attention")
        yield from linear("o_proj", self.value_width, hidden, self.bias)
        index = self.indexer
        if index is not None and not index.is_shared:
            assert self.q_lora_rank is not None
            yield from linear("indexer.wq_b", self.q_lora_rank, index.num_heads * index.head_dim)
            yield from linear("indexer.wk", hidden, index.head_dim)
            yield Weight("indexer.k_norm.weight", (index.head_dim,), "norms")
            yield Weight("indexer.k_norm.bias", (index.head_dim,), "norms")
            yield Weight("indexer.weights_proj.weight", (index.num_heads, hidden), "attention", is_wide=True)

    def cache(self, block_size: int, dtype: str) -> KVCacheSpec:
        return LatentAttentionSpec(
            block_size=block_size, width=self.row_width, rank=self.kv_lora_rank, dtype=dtype, dcp_size=self.dcp_size
        )


class RecurrentSpec:
    """A mixer that keeps states of a sequence, whatever its length."""

    __slots__ = ()

    @property
    def states(self) -> tuple[StateTensor, ...]:
        """Tensors that it keeps of each sequence."""
        raise NotImplementedError

    @property
    def state_inputs(self) -> StateInputs:
        """An upper bound: a convolution's channels; what its other state is written and read with, at most as many
        again and two for each of its rows. A mixer whose ops are given more says so."""
        return StateInputs(_state_inputs(self.states))

    def cache(self, block_size: int, dtype: str) -> KVCacheSpec:
        """The states, per sequence."""
        return MambaSpec(block_size=block_size, states=self.states)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Spec(RecurrentSpec):
    """A Mamba-2 mixer (Dao & Gu 2024, arXiv:2405.21060)."""

    name: str = "mamba"
    hidden_size: int
    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_kernel: int
    conv_bias: bool
    proj_bias: bool
    eps: float
    """Of the norm behind the scan."""
    normed: bool = True
    """Behind the scan there is a norm beside the gate, over the channels of each group for themselves."""
    norm_before_gate: bool = False
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    """Bounds of the time steps."""
    factors: tuple[float, ...] = ()
    """Of the parts of the first projection: gate, input, what writes the state, what reads it, time steps."""

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: what goes into the state, and what writes and reads it."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def width(self) -> int:
        """Projected, convolved, and the scan's copies."""
        return (
            2 * (self.inner_size + self.conv_size)
            + self.num_heads
            + 2 * (4 * self.inner_size + 2 * self.num_heads * self.state_size)
        )

    @property
    def states(self) -> tuple[StateTensor, ...]:
        return (
            StateTensor("conv", (self.conv_kernel - 1, self.conv_size), "float32"),
            StateTensor("ssm", (self.num_heads, self.head_dim, self.state_size), "float32"),
        )

    def weights(self) -> Iterator[Weight]:
        part, inputs = "state space", self.inner_size + self.conv_size + self.num_heads
        for name, sizes in (("in_proj", (self.hidden_size, inputs)), ("out_proj", (self.inner_size, self.hidden_size))):
            linear = LinearSpec(name=name, in_features=sizes[0], out_features=sizes[1], bias=self.proj_bias)
            yield from inside(self.name, linear.weights(part))
        yield from inside(self.name, _convolution("conv1d", self.conv_size, self.conv_kernel, self.conv_bias, part))
        if self.normed:
            yield Weight(f"{self.name}.norm.weight", (self.inner_size,), part)
        for name in ("A_log", "D", "dt_bias"):
            yield Weight(f"{self.name}.{name}", (self.num_heads,), part, is_wide=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba1Spec(RecurrentSpec):
    """A Mamba mixer (Gu & Dao 2023, arXiv:2312.00752)."""

    name: str = "mamba"
    hidden_size: int
    inner_size: int
    state_size: int
    dt_rank: int
    """Width that time steps are projected from."""
    conv_kernel: int
    conv_bias: bool
    proj_bias: bool
    eps: float = 1e-6
    """Of the norms of time steps and projections."""
    norms: Literal["", "weighted", "plain"] = ""
    """"weighted" (Jamba): time steps and projections are normalised; "plain" (Falcon Mamba): so they are, without
    weights."""

    @property
    def width(self) -> int:
        """Projected, convolved, and the scan's copies."""
        return 4 * self.inner_size + 2 * (5 * self.inner_size + 2 * self.state_size)

    @property
    def states(self) -> tuple[StateTensor, ...]:
        return (
            StateTensor("conv", (self.conv_kernel - 1, self.inner_size), "float32"),
            StateTensor("ssm", (self.inner_size, self.state_size), "float32"),
        )

    def weights(self) -> Iterator[Weight]:
        yield from inside(self.name, self._weights("state space"))

    def _weights(self, part: str) -> Iterator[Weight]:
        inner, hidden, numbers = self.inner_size, self.hidden_size, self.state_size
        sizes = {
            "in_proj": (hidden, 2 * inner, self.proj_bias),
            "x_proj": (inner, self.dt_rank + 2 * numbers, False),
            "dt_proj": (self.dt_rank, inner, False),
            "out_proj": (inner, hidden, self.proj_bias),
        }
        for name, (inputs, outputs, bias) in sizes.items():
            yield from LinearSpec(name=name, in_features=inputs, out_features=outputs, bias=bias).weights(part)
        yield from _convolution("conv1d", inner, self.conv_kernel, self.conv_bias, part)
        if self.norms == "weighted":
            for name, size in (("dt_layernorm", self.dt_rank), ("b_layernorm", numbers), ("c_layernorm", numbers)):
                yield Weight(f"{name}.weight", (size,), part)
        yield Weight("A_log", (inner, numbers), part, is_wide=True)
        yield Weight("D", (inner,), part, is_wide=True)
        yield Weight("dt_proj.bias", (inner,), part, is_wide=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec(RecurrentSpec):
    """A gated short convolution (LFM2): out(c * conv(b * x)) with b, c and x projected."""

    name: str = "conv"
    hidden_size: int
    conv_kernel: int
    bias: bool

    @property
    def width(self) -> int:
        return 6 * self.hidden_size

    @property
    def states(self) -> tuple[StateTensor, ...]:
        return (StateTensor("conv", (self.conv_kernel - 1, self.hidden_size), "float32"),)

    def weights(self) -> Iterator[Weight]:
        hidden, part = self.hidden_size, "convolution"
        for name, outputs in (("in_proj", 3 * hidden), ("out_proj", hidden)):
            linear = LinearSpec(name=name, in_features=hidden, out_features=outputs, bias=self.bias)
            yield from inside(self.name, linear.weights(part))
        yield from inside(self.name, _convolution("conv", hidden, self.conv_kernel, self.bias, part))


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaSpec(RecurrentSpec):
    """A gated delta net (Yang et al. 2024, arXiv:2412.06464)."""

    name: str = "linear_attn"
    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    eps: float
    """Of the norm behind it."""
    by_key_head: bool
    """Two projections bring everything, key head by key head (Qwen3-Next), instead of four."""
    output_gate: Literal["silu", "sigmoid"] = "silu"
    """Of the gate behind the norm."""

    @property
    def key_size(self) -> int:
        """Width of all keys together, and of all queries."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_size(self) -> int:
        return 2 * self.key_size + self.value_size

    @property
    def width(self) -> int:
        """Projected, convolved, and copies in float32 with a key per value head."""
        copies = 4 * self.num_value_heads * (self.key_head_dim + self.value_head_dim)
        return 2 * self.conv_size + 3 * self.value_size + 2 * copies

    @property
    def states(self) -> tuple[StateTensor, ...]:
        state = (self.num_value_heads, self.key_head_dim, self.value_head_dim)
        return (
            StateTensor("conv", (self.conv_kernel - 1, self.conv_size), "float32"),
            StateTensor("delta", state, "float32"),
        )

    def projections(self) -> tuple[LinearSpec, ...]:
        """Layers that take the input: queries, keys, values and gate, then decays and strengths."""
        heads = self.num_value_heads
        sizes = {"in_proj_qkvz": self.conv_size + self.value_size, "in_proj_ba": 2 * heads}
        if not self.by_key_head:
            sizes = {"in_proj_qkv": self.conv_size, "in_proj_z": self.value_size, "in_proj_a": heads}
            sizes["in_proj_b"] = heads
        return tuple(
            LinearSpec(name=name, in_features=self.hidden_size, out_features=size) for name, size in sizes.items()
        )

    def weights(self) -> Iterator[Weight]:
        part, heads = "linear attention", self.num_value_heads
        out_proj = LinearSpec(name="out_proj", in_features=self.value_size, out_features=self.hidden_size)
        for linear in (*self.projections(), out_proj):
            yield from inside(self.name, linear.weights(part))
        yield from inside(self.name, _convolution("conv1d", self.conv_size, self.conv_kernel, False, part))
        yield Weight(f"{self.name}.norm.weight", (self.value_head_dim,), part)
        for name in ("A_log", "dt_bias"):
            yield Weight(f"{self.name}.{name}", (heads,), part, is_wide=True)


def _convolution(name: str, channels: int, taps: int, bias: bool, part: str) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", (channels, 1, taps), part)
    if bias:
        yield Weight(f"{name}.bias", (channels,), part)


def _state_inputs(states: tuple[StateTensor, ...]) -> int:
    inputs = 0
    for state in states:
        channels = state.shape[-1]
        if len(state.shape) == 2 and state.name != "ssm":
            inputs += 2 * channels if state.name == "wkv" else channels
        elif state.name == "kv":  # lightning attention has no convolution before it
            inputs += (3 * channels + 1) * state.shape[0]
        elif len(state.shape) == 2:  # Mamba: channels and time steps, and what writes and reads the state
            inputs += 2 * (state.shape[0] + channels)
        else:
            inputs += inputs + 2 * state.shape[0]
    return inputs

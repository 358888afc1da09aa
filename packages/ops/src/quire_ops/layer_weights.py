"""The layers of a decoder as data, for backends that compute all of them in one call (op `decoder_stack`).

A layer is a mixer and a feed-forward network, either of which may be missing, with norms at any place:
x + f * norm(mixer(norm(x))), then x + f * norm(feed_forward(norm(x))). Knows weights and sizes; knows no checkpoint.

Shape legend: Hq query heads, Hkv key-value heads, D head dimension, R rotated dimensions of a head, E experts, K taps
of a convolution, C its channels.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire_ops.fused_moe import Experts
from quire_ops.linear_weights import GatedWeights, LinearWeights
from quire_ops.routing import RoutingRule

__all__ = [
    "AttentionWeights",
    "CrossAttentionWeights",
    "DecoderLayerWeights",
    "FeedForwardWeights",
    "GatedDeltaWeights",
    "GatedNormWeights",
    "LatentAttentionWeights",
    "MLPWeights",
    "Mamba2Weights",
    "MixerWeights",
    "NormWeights",
    "RoutedExperts",
    "ShortConvWeights",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormWeights:
    """A norm over [..., size], in any dtype."""

    kind: str = "rms"
    """"rms" (Zhang & Sennrich 2019) or "layer" (Ba et al. 2016)."""
    weight: Tensor | None
    """[size]; None for ones, in a layer norm."""
    bias: Tensor | None = None
    """[size], of a layer norm."""
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """Self-attention over the paged cache."""

    q: LinearWeights
    """[Hq * D, hidden_size]; where `gated`, behind each head's rows are those of its gate: [Hq, 2, D]."""
    k: LinearWeights
    v: LinearWeights
    o: LinearWeights
    head_dim: int
    q_norm: Tensor | None = None
    """[D]: each query head has an RMS norm; or [Hq * D]: all at once (OLMo 2); k_norm likewise for keys. Both are
    there, or none."""
    k_norm: Tensor | None = None
    norm_eps: float = 0.0
    """Of `q_norm` and `k_norm`."""
    norm_after_rotation: bool = False
    """Heads are normalised after they are rotated, not before."""
    scale: float
    """Factor of the attention scores."""
    soft_cap: float | None = None
    """As op `paged_attention` takes it, as the next two."""
    sliding_window: int | None = None
    sinks: Tensor | None = None
    """[Hq]."""
    alibi_slopes: Tensor | None = None
    """[Hq], as op `paged_attention` takes them."""
    rotation: int | None = 0
    """Which of the step's rotations queries and keys get; None for none."""
    interleaved: bool = False
    """Neighbours are the pairs that are rotated (2i, 2i + 1), not (i, i + R / 2); what comes back is in the order of
    the latter."""
    rotates_in_steps: bool = False
    """Called op by op, this attention is rotated by op `rotary_embedding`, which rounds products too."""
    gated: bool = False
    """The result of each head is multiplied by the sigmoid of its gate."""
    kv_scale: Tensor | None = None
    """[2, Hkv] float32, of a cache in fp8, as op `write_kv_cache` takes it."""
    int8_products: bool = False
    """As op `paged_attention` takes it."""
    rank_widths: tuple[int, ...] = ()
    """Hq * D of each rank, where ranks share heads out and these are one rank's; `o` takes those of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossAttentionWeights:
    """Attention of each token to all that is in the cache for it: what an encoder read (Vaswani et al. 2017, sec.
    3.2.3). In the layout of its group each token of the step is a sequence of its own."""

    q: LinearWeights
    """[Hq * D, hidden_size]."""
    o: LinearWeights
    num_kv_heads: int
    head_dim: int
    scale: float
    kv_scale: Tensor | None = None
    """As of `AttentionWeights`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionWeights:
    """Multi-head latent attention, its up-projections absorbed (DeepSeek-AI 2024, DeepSeek-V2, sec. 2.1).

    H heads of N dimensions without and R with rotation, latents of L numbers, values of V.
    """

    q_down: LinearWeights
    """[q_rank, hidden_size]; [H * (N + R), hidden_size] where queries have no latent."""
    q_norm: NormWeights | None = None
    """[q_rank], of the queries' latent; None where there is none, as `q_up`."""
    q_up: LinearWeights | None = None
    """[H * (N + R), q_rank]."""
    kv_down: LinearWeights
    """[L + R, hidden_size]."""
    kv_norm: NormWeights
    """[L], of keys' and values' latent."""
    key_up: Tensor
    """[H, L, N], each head contiguous, in the network's dtype."""
    value_up: Tensor
    """[H, V, L], each head contiguous."""
    o: LinearWeights
    """[hidden_size, H * V]."""
    scale: float
    rotation: int = 0
    interleaved: bool = False
    rank_widths: tuple[int, ...] = ()
    """H * V of each rank, where ranks share heads out and these are one rank's; `o` takes those of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedNormWeights:
    """An RMS norm over groups of channels with a SiLU gate before or behind it (Mamba-2, arXiv:2405.21060, sec. 7)."""

    weight: Tensor | None
    """[size]; None where there is only the gate."""
    groups: int = 1
    before_gate: bool = False
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Weights:
    """A Mamba-2 mixer (Dao & Gu 2024, arXiv:2405.21060, sec. 7). States: of the convolution, of the scan."""

    in_proj: LinearWeights
    """Side by side: gate; what is convolved, channels of heads, then what writes and reads the state; time steps."""
    taps: Tensor
    """[C, K], in the network's dtype, whose transpose is contiguous; as op `causal_conv1d` takes it."""
    conv_bias: Tensor | None
    a: Tensor
    """[heads] float32, as op `mamba2_scan` takes it, as the next two."""
    d: Tensor
    dt_bias: Tensor
    dt_limit: tuple[float, float]
    head_dim: int
    num_groups: int
    state_size: int
    norm: GatedNormWeights
    out_proj: LinearWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaWeights:
    """A gated delta net (Yang et al. 2024, arXiv:2412.06464, fig. 1). States: of the convolution, of the delta rule."""

    in_proj: tuple[LinearWeights, ...]
    """Queries, keys and values side by side; gates; decays; strengths. Or two where `by_key_head`: for each key head
    its query, its key, its values and their gates; for each key head strengths, then decays."""
    by_key_head: bool
    taps: Tensor
    """[C, K], as in `Mamba2Weights`."""
    a_log: Tensor
    """[value heads] float32, as op `gated_delta_rule` takes it, as the next one."""
    dt_bias: Tensor
    key_heads: int
    key_dim: int
    value_dim: int
    norm: GatedNormWeights
    """Of each value head."""
    out_proj: LinearWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvWeights:
    """A gated short convolution (LFM2): out(c * conv(b * x)) with b, c and x projected side by side. State: of the
    convolution."""

    in_proj: LinearWeights
    taps: Tensor
    """[hidden_size, K], as in `Mamba2Weights`."""
    conv_bias: Tensor | None
    out_proj: LinearWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPWeights:
    """A feed-forward network without a gate: down(act(up(x)))."""

    up: LinearWeights
    down: LinearWeights
    activation: str
    """A name of op `activation`, "relu" or "relu2", its square."""
    rank_widths: tuple[int, ...] = ()
    """As in `GatedWeights`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """Experts, and how each token chooses among them."""

    router: Tensor
    """[E, hidden_size], contiguous, in the network's dtype; logits stay as wide as they are summed."""
    router_bias: Tensor | None = None
    """[E] float32, added to the logits."""
    choice_bias: Tensor | None = None
    """[E] float32, as op `route_experts` takes it."""
    rule: RoutingRule
    experts: Experts
    shared: GatedWeights | None = None
    """What every token uses beside its experts."""
    shared_gate: Tensor | None = None
    """[1, hidden_size], contiguous, in the network's dtype: that counts as much as the sigmoid of its product says."""


MixerWeights = (
    AttentionWeights
    | CrossAttentionWeights
    | LatentAttentionWeights
    | Mamba2Weights
    | GatedDeltaWeights
    | ShortConvWeights
)
FeedForwardWeights = GatedWeights | MLPWeights | RoutedExperts


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayerWeights:
    """One layer; norms that are None are left out."""

    input_norm: NormWeights | None
    mixer: MixerWeights | None
    cache: int = 0
    """Index of the mixer's cache among those of a step."""
    attention_out_norm: NormWeights | None = None
    """Of what the mixer gives, before it is added."""
    feed_forward_norm: NormWeights | None = None
    feed_forward: FeedForwardWeights | None
    feed_forward_out_norm: NormWeights | None = None
    """Of what the feed-forward part gives, before it is added."""
    residual_factor: float = 1.0
    """Of what both parts give, before it is added."""
    parallel: bool = False
    """Both parts read the layer's input: x + mixer(norm(x)) + feed_forward(norm(x))."""

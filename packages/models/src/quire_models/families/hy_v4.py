"""Hunyuan V4 (Tencent 2026): GLM-5's sparse latent attention with sinks and gates, experts with limits, and a residual
stream of several channels, which every part reads and writes by gates (hyper-connections, Zhu et al. 2024,
arXiv:2409.19606)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from quire_interfaces import Fields
from quire_models.config_fields import layer_kinds
from quire_models.families.deepseek_v2 import latent_attention
from quire_models.families.deepseek_v32 import SparseLatentSelfAttentionSpec, indexed_attentions, indexed_layers
from quire_models.families.glm4_moe import grouped_moe
from quire_models.families.glm4_moe_lite import MLP_KINDS
from quire_models.families.step3p5 import LimitedMoESpec
from quire_models.spec import CheckpointNames, LayerSpec, LinearSpec, NetworkSpec, Weight, inside, recast

__all__ = ["ClampedMoESpec", "GatedSinkLatentSpec", "HyperLayerSpec", "HyperNetworkSpec", "StreamsSpec", "spec"]

DEFAULTS = {
    "rms_norm_eps": 1e-5, "qk_rope_head_dim": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "v_head_dim": 256,
    "q_lora_rank": 1536, "max_position_embeddings": 262144, "index_n_heads": 16, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "n_shared_experts": 1, "routed_scaling_factor": 2.827,
    "index_topk_freq": 4, "index_skip_topk_offset": 2, "rope_interleave": False,
}  # fmt: skip
"""Of the class, where config.json does not say."""

PUBLISHED_NAMES = (
    (".hc_pre.hc_", ".hc_"), (".hc_attn_layer.hc_", ".attn_hc."), (".hc_mlp_layer.hc_", ".ffn_hc."),
    (".hc_head_", ".hc_"), (".learnable_sink_param", ".sinks"), (".linear_gate.", ".gate_proj."),
)  # fmt: skip
"""(part of a tensor's name, what Transformers' class calls it)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedSinkLatentSpec(SparseLatentSelfAttentionSpec):
    """Sparse latent attention with a learned score of each head that gives nothing, and a gate of each number that a
    head gives."""

    built_by: ClassVar[str] = "quire_models.families.hy_v4_layers:GatedSinkLatentAttention"

    def gate(self) -> LinearSpec:
        """From x to the gates."""
        return self.projection("gate_proj", self.hidden_size, self.v_head_dim)

    def weights(self) -> Iterator[Weight]:
        """Those of the attention, the gate's, and the sinks."""
        yield from SparseLatentSelfAttentionSpec.weights(self)
        yield from inside(self.name, self.gate().weights("attention"))
        yield Weight(f"{self.name}.sinks", (self.num_heads,), "attention", is_wide=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedMoESpec(LimitedMoESpec):
    """Experts whose gates are kept within the limit before their activation."""

    built_by: ClassVar[str] = "quire_models.families.hy_v4_layers:ClampedMoE"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsSpec:
    """The residual stream: several channels as wide as the network."""

    num_streams: int
    hidden_size: int
    norm_eps: float
    gate_eps: float
    """Added to every gate."""
    magnitude: float
    """Factor of the gates by which a part writes."""

    def weights(self, name: str, gates: int, prefix: str = "") -> Iterator[Weight]:
        """What makes `gates` kinds of gates, one for each channel, of all channels: matrix, factors and biases."""
        rows, width = gates * self.num_streams, self.num_streams * self.hidden_size
        for part, shape in (("fn", (rows, width)), ("base", (rows,)), ("scale", (gates,))):
            yield Weight(f"{name}.{prefix}{part}", shape, "norms", is_wide=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperLayerSpec(LayerSpec):
    """Two parts, each of which reads a mixture of the channels and adds what it gives to all of them."""

    streams: StreamsSpec
    built_by: ClassVar[str] = "quire_models.families.hy_v4_layers:HyperLayer"

    def weights(self) -> Iterator[Weight]:
        """Parameters of all parts, and of their gates."""
        yield from LayerSpec.weights(self)
        for name in ("attn_hc", "ffn_hc"):
            yield from self.streams.weights(f"{self.name}.{name}", 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperNetworkSpec(NetworkSpec):
    """A network of such layers: all channels begin as the embedding, and the last norm reads a mixture of them."""

    streams: StreamsSpec
    built_by: ClassVar[str] = "quire_models.families.hy_v4_layers:HyperDecoderLM"

    @property
    def inner_width(self) -> int:
        """The channels before and behind a part, in float32, too, beside what the part keeps."""
        width: int = NetworkSpec.inner_width.__get__(self)
        return width + 9 * self.streams.num_streams * self.hidden_size

    def weights(self) -> Iterator[Weight]:
        """Those of the network, and of the gates behind the last layer."""
        yield from NetworkSpec.weights(self)
        yield from self.streams.weights(f"{self.body}.hc_head", 1, "hc_")


def spec(config: Fields) -> NetworkSpec:
    """All layers but the first have experts, where `mlp_layer_types` does not say; the first one and every fourth
    behind it have an indexer, where `indexer_types` does not."""
    for name, value in DEFAULTS.items():
        config = config.with_default(name, value)
    config.fixed("rope_interleave", False)
    sizes, attention = latent_attention(config)
    num = sizes.num_layers
    mixers = indexed_attentions(
        config, recast(GatedSinkLatentSpec, attention), indexed_layers(config, num), interleaved=False
    )
    limit = config.number("swiglu_limit", default=10.0, above=0.0)
    moe = recast(ClampedMoESpec, grouped_moe(config, sizes, limit=limit))
    sparse = layer_kinds(config, "mlp_layer_types", num, MLP_KINDS, [layer > 0 for layer in sizes.layers])
    streams = StreamsSpec(
        num_streams=config.integer("hc_mult", default=4, minimum=1),
        hidden_size=sizes.hidden_size,
        norm_eps=sizes.eps,
        gate_eps=config.number("hc_eps", default=1e-6, minimum=0.0),
        magnitude=config.number("hc_magnitude", default=2.0),
    )
    layers = (sizes.pre_norm(layer, mixers[layer], moe if sparse[layer] else None) for layer in sizes.layers)
    kind: dict[str, Any] = {"kind": HyperNetworkSpec, "streams": streams}
    return sizes.network(
        (recast(HyperLayerSpec, layer, streams=streams) for layer in layers),
        checkpoint=CheckpointNames(ignored_prefixes=("model.mtp_layers.",), renamed=PUBLISHED_NAMES),
        **kind,
    )

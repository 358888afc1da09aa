"""GLM-5.3 Flash (Z.ai 2026), called GLM-5-Next in Transformers: Kimi's delta attention beside sparse latent attention
without positions, whose index finds pools of tokens, and a residual stream of several channels that every part mixes
(manifold-constrained hyper-connections, Xie et al. 2026)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import layer_kinds
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes
from quire_models.families.deepseek_v4 import MixedStreamsSpec
from quire_models.families.deepseek_v32 import SparseLatentSelfAttentionSpec, indexed_attentions, indexed_layers
from quire_models.families.glm4_moe import grouped_moe
from quire_models.families.glm4_moe_lite import MLP_KINDS
from quire_models.families.hy_v4 import ClampedMoESpec, HyperLayerSpec, HyperNetworkSpec
from quire_models.families.kimi_linear import KimiDeltaSpec
from quire_models.families.step3p5 import LimitedMLPSpec
from quire_models.feed_forward_spec import GatedMLPSpec
from quire_models.mixer_spec import IndexerSpec
from quire_models.spec import CheckpointNames, LinearSpec, MixerSpec, NetworkSpec, Weight, inside, recast

__all__ = ["ClampedMLPSpec", "MixedLayerSpec", "MixedNetworkSpec", "PooledIndexerSpec", "PooledLatentSpec", "spec"]

LAYER_KINDS = {"linear_attention": False, "indexed_attention": True, "full_attention": True}
LOWER_BOUND = -5.0
"""Least logarithm of a decay, where config.json has none; null stands for no bound."""
DEFAULTS = {
    "rms_norm_eps": 1e-5, "kv_lora_rank": 512, "qk_nope_head_dim": 256, "v_head_dim": 256, "q_lora_rank": 1536,
    "max_position_embeddings": 1048576, "index_n_heads": 32, "n_routed_experts": 288, "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
}  # fmt: skip
"""Of the class, where config.json does not say."""
NAMES = (
    (".hc_attn_", ".attn_hc."), (".hc_ffn_", ".ffn_hc."), (".self_attn.forget_gate.", ".self_attn."),
    (".index_kpool_compress_gate", ".index_kpool_compress_gate.weight"),
)  # fmt: skip
"""(part of a tensor's name, as published or of Transformers' class, what it is called here)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledIndexerSpec(IndexerSpec):
    """An indexer that finds pools of tokens."""

    pool: int
    """Tokens of a pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledLatentSpec(SparseLatentSelfAttentionSpec):
    """Sparse latent attention without rotation, over the tokens of pools, and those behind the last whole one."""

    indexer: PooledIndexerSpec
    built_by: ClassVar[str] = "quire_models.families.glm5_next_layers:PooledLatentAttention"

    @property
    def row_width(self) -> int:
        """The latent; the indexer's key, and its weight in a pool."""
        return self.kv_lora_rank + 2 * self.indexer.head_dim

    def pool_gate(self) -> LinearSpec:
        """From x to the weight that each dimension of a token's key has in its pool."""
        outputs = self.indexer.head_dim
        name = "indexer.index_kpool_compress_gate"
        return LinearSpec(name=name, in_features=self.hidden_size, out_features=outputs, is_plain=True)

    def weights(self) -> Iterator[Weight]:
        """Those of the attention, and what makes keys of pools."""
        yield from SparseLatentSelfAttentionSpec.weights(self)
        if not self.indexer.is_shared:
            yield from inside(self.name, self.pool_gate().weights("attention"))
            shape = (self.indexer.pool, self.indexer.head_dim)
            yield Weight(f"{self.name}.indexer.index_kpool_compress_ape", shape, "attention", is_wide=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedMLPSpec(LimitedMLPSpec):
    """down(act(min(gate(x), c)) * clamp(up(x), -c, c))."""

    built_by: ClassVar[str] = "quire_models.families.glm5_next_layers:clamped_mlp"


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedLayerSpec(HyperLayerSpec):
    """Two parts, each of which reads a mixture of the channels, mixes them, and adds what it gives to all of them."""

    built_by: ClassVar[str] = "quire_models.families.glm5_next_layers:MixedLayer"


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedNetworkSpec(HyperNetworkSpec):
    """A network of such layers; the last norm reads the mean of the channels."""

    built_by: ClassVar[str] = "quire_models.families.glm5_next_layers:MixedDecoderLM"

    def weights(self) -> Iterator[Weight]:
        """Nothing stands behind the last layer but the norm."""
        return NetworkSpec.weights(self)


def spec(config: Fields) -> NetworkSpec:
    """Every fourth layer attends, where `layer_types` does not say, and all but the first three have experts, where
    `mlp_layer_types` does not."""
    for name, value in DEFAULTS.items():
        config = config.with_default(name, value)
    config.fixed("qk_rope_head_dim", 0)
    config.fixed("index_kpool_always_select_tail", True)
    sizes = decoder_sizes(config.named(head_dim="qk_nope_head_dim"), rotary=False)
    num = sizes.num_layers
    attends = layer_kinds(config, "layer_types", num, LAYER_KINDS, [layer % 4 == 3 for layer in sizes.layers])
    attentions, delta = _attentions(config, sizes), _delta(config, sizes)
    first = next((layer for layer in sizes.layers if attends[layer]), None)
    if first is not None and attentions[first].indexer.is_shared:
        raise CheckpointError(f"{config.source}: layer {first}, the first that attends, must have an index of its own")
    mixers: list[MixerSpec] = [attentions[layer] if attends[layer] else delta for layer in sizes.layers]
    limit = config.number("swiglu_limit", default=10.0, above=0.0)
    moe = recast(ClampedMoESpec, grouped_moe(config, sizes, limit=limit))
    assert isinstance(moe.shared, GatedMLPSpec)
    moe = replace(moe, shared=recast(ClampedMLPSpec, moe.shared, limit=limit))
    dense = recast(ClampedMLPSpec, sizes.gated_mlp(), limit=limit)
    sparse = layer_kinds(config, "mlp_layer_types", num, MLP_KINDS, [layer >= 3 for layer in sizes.layers])
    streams = MixedStreamsSpec(
        num_streams=config.integer("hc_mult", default=4, minimum=1),
        hidden_size=sizes.hidden_size,
        norm_eps=sizes.eps,
        gate_eps=config.number("hc_eps", default=1e-6, minimum=0.0),
        magnitude=2.0,
        num_iterations=config.integer("hc_sinkhorn_iters", default=20, minimum=1),
    )
    layers = (sizes.pre_norm(layer, mixers[layer], moe if sparse[layer] else dense) for layer in sizes.layers)
    kind: dict[str, Any] = {"kind": MixedNetworkSpec, "streams": streams}
    return sizes.network(
        (recast(MixedLayerSpec, layer, streams=streams) for layer in layers),
        checkpoint=CheckpointNames(ignored_prefixes=(f"model.layers.{num}.",), renamed=NAMES),
        **kind,
    )


def _attentions(config: Fields, sizes: DecoderSizes) -> list[Any]:
    """The attention of each layer, if it attends."""
    head_dim = config.integer("qk_nope_head_dim", minimum=1)
    attention = SparseLatentSelfAttentionSpec(
        hidden_size=sizes.hidden_size,
        num_heads=sizes.num_heads,
        q_lora_rank=config.integer("q_lora_rank", minimum=1),
        kv_lora_rank=config.integer("kv_lora_rank", minimum=1),
        qk_nope_head_dim=head_dim,
        rotary_dim=0,
        v_head_dim=config.integer("v_head_dim", minimum=1),
        scale=head_dim**-0.5,
        rope=None,  # type: ignore[arg-type]  # there are no positions
        interleaved=False,
        bias=config.flag("attention_bias", default=False),
        norm_eps=sizes.eps,
    )
    pool = config.integer("index_kpool", default=16, minimum=1)
    found = indexed_attentions(config, attention, indexed_layers(config, sizes.num_layers), interleaved=False)
    topk = config.integer("index_topk", default=2048)
    if topk % pool:
        raise CheckpointError(f"{config.source}: index_topk ({topk}) must be a multiple of index_kpool ({pool})")
    return [
        recast(PooledLatentSpec, replace(each, indexer=recast(PooledIndexerSpec, each.indexer, pool=pool)))
        for each in found
    ]


def _delta(config: Fields, sizes: DecoderSizes) -> KimiDeltaSpec:
    """Published files say its sizes in `linear_attn_config`."""
    linear = config.object("linear_attn_config") or Fields({}, config.source)
    heads = linear.integer("num_heads", default=config.integer("linear_num_heads", default=64), minimum=1)
    head_dim = linear.integer("head_dim", default=config.integer("linear_head_dim", default=128), minimum=1)
    taps = config.integer("linear_conv_kernel_dim", default=4, minimum=2)
    bound = None if config.is_null("linear_lower_bound") else config.number("linear_lower_bound", default=LOWER_BOUND)
    if config.get("linear_attn_config"):
        bound = None if linear.is_null("gate_lower_bound") else linear.number("gate_lower_bound", default=bound)
        bound = LOWER_BOUND if bound is None and linear.flag("safe_gate", default=True) else bound
    linear.skip("kda_layers", "full_attn_layers")
    return KimiDeltaSpec(
        hidden_size=sizes.hidden_size,
        num_heads=heads,
        head_dim=head_dim,
        conv_kernel=linear.integer("short_conv_kernel_size", default=taps, minimum=2),
        eps=sizes.eps,
        rank=head_dim,
        lower_bound=bound,
        a_log_shape=(heads,),
    )

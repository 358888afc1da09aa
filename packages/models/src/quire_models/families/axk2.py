"""A.X K2 (SK Telecom 2026): DeepSeek-V3.2's network, whose norms have gates of low rank, and whose attention has gates
that the queries' latent gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from quire_interfaces import Fields
from quire_models.config_fields import layer_kinds
from quire_models.families.deepseek_v2 import latent_attention
from quire_models.families.deepseek_v32 import SparseLatentSelfAttentionSpec, indexed_attentions
from quire_models.families.glm4_moe import grouped_moe
from quire_models.families.glm4_moe_lite import MLP_KINDS
from quire_models.feed_forward_spec import SparseMoESpec
from quire_models.spec import CheckpointNames, LinearSpec, NetworkSpec, NormSpec, Weight, recast

__all__ = ["GatedLatentSpec", "GatedNormSpec", "ZeroedGroupsSpec", "spec"]

DEFAULTS = {
    "max_position_embeddings": 131072, "qk_rope_head_dim": 32, "kv_lora_rank": 128, "qk_nope_head_dim": 64,
    "v_head_dim": 64, "q_lora_rank": 384, "index_n_heads": 16, "n_routed_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 512, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
}  # fmt: skip
"""Of the class, where config.json does not say."""
PUBLISHED_NAMES = ((".W_down.", ".mlp.fc1."), (".W_up.", ".mlp.fc2."), (".q_b_proj.", ".q_gate_proj."))
"""(part of a tensor's name, what Transformers' class calls it)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedNormSpec(NormSpec):
    """y * sigmoid(W2 silu(W1 y)), where y is an RMS norm."""

    rank: int
    """Rows of W1."""
    built_by: ClassVar[str] = "quire_models.families.axk2_layers:GatedRMSNorm"

    def weights(self) -> Iterator[Weight]:
        """The norm's, W1 and W2."""
        yield Weight(f"{self.name}.norm.weight", (self.size,), "norms")
        yield Weight(f"{self.name}.mlp.fc1.weight", (self.rank, self.size), "norms")
        yield Weight(f"{self.name}.mlp.fc2.weight", (self.size, self.rank), "norms")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedLatentSpec(SparseLatentSelfAttentionSpec):
    """Sparse latent attention; the queries' latent, after its norm and before it, gives queries, and gates of what
    heads give."""

    built_by: ClassVar[str] = "quire_models.families.axk2_layers:GatedLatentAttention"

    @property
    def query_up(self) -> LinearSpec:
        """Each head's query, then its gates."""
        assert self.q_lora_rank is not None
        return self.projection("q_gate_proj", 2 * self.q_lora_rank, self.head_dim + self.v_head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroedGroupsSpec(SparseMoESpec):
    """Experts of the groups that a token did not choose count as zero in its choice of experts: it can choose them
    before others that the bias makes less than zero."""

    built_by: ClassVar[str] = "quire_models.families.axk2_layers:ZeroedGroupsMoE"


def spec(config: Fields) -> NetworkSpec:
    """Norms in front of experts have gates, those in front of other networks have none."""
    for name, value in DEFAULTS.items():
        config = config.with_default(name, value)
    config.fixed("rope_interleave", True)
    sizes, attention = latent_attention(config)
    num = sizes.num_layers
    mixers = indexed_attentions(config, recast(GatedLatentSpec, attention), (True,) * num, interleaved=False)
    moe = grouped_moe(config, sizes)
    if moe.routing.num_groups > 1:
        moe = recast(ZeroedGroupsSpec, moe)
    dense = config.integer("first_k_dense_replace", default=1, minimum=0)
    step = config.integer("moe_layer_freq", default=1, minimum=1)
    behind = [layer >= dense and layer % step == 0 for layer in sizes.layers]
    sparse = layer_kinds(config, "mlp_layer_types", num, MLP_KINDS, behind)
    rank = config.integer("gated_norm_rank", default=16, minimum=1)

    def gated(name: str) -> NormSpec:
        return recast(GatedNormSpec, sizes.rms_norm(name), rank=rank)

    def before(name: str) -> NormSpec:
        return gated(name) if name == "input_layernorm" else sizes.rms_norm(name)

    return sizes.network(
        (
            sizes.pre_norm(layer, mixer, moe if sparse[layer] else None, norm=gated if sparse[layer] else before)
            for layer, mixer in enumerate(mixers)
        ),
        checkpoint=CheckpointNames(ignored_suffixes=("inv_freq",), renamed=PUBLISHED_NAMES),
    )

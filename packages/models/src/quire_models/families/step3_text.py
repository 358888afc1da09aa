"""Step-3, text (StepFun 2025, arXiv:2507.19427): multi-matrix factorisation attention, whose queries come from a latent
that is normalised, over one key and one value head; experts chosen by softmax, beside one that all tokens use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from quire_interfaces import CheckpointError, Fields
from quire_models.decoder_sizes import decoder_sizes, expert_counts
from quire_models.feed_forward_spec import Routing, StackedExperts
from quire_models.mixer_spec import SelfAttentionSpec
from quire_models.spec import CheckpointNames, FusedRows, LinearSpec, NetworkSpec, NormSpec, Weight, inside

__all__ = ["FactorisedAttentionSpec", "spec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorisedAttentionSpec(SelfAttentionSpec):
    """Attention whose queries are projected twice, with a norm in between (sec. 3.1)."""

    q_latent: NormSpec
    """Of what the first projection of the queries gives."""
    built_by: ClassVar[str] = "quire_models.families.step3_text_layers:FactorisedAttention"

    def down(self) -> LinearSpec:
        """From the stream to the latent of the queries."""
        return LinearSpec(name="q_proj", in_features=self.hidden_size, out_features=self.q_latent.size)

    def up(self) -> LinearSpec:
        """From there to all query heads."""
        return LinearSpec(name="wq", in_features=self.q_latent.size, out_features=self.query_size)

    def weights(self) -> Iterator[Weight]:
        _, key, value, out = self.projections()
        for linear in (self.down(), self.up(), key, value, out):
            yield from inside(self.name, linear.weights("attention"))
        yield from inside(self.name, self.q_latent.weights())


def spec(config: Fields) -> NetworkSpec:
    """`moe_layers_enum` lists the layers with experts; where there is none, all but the first have them."""
    named = config.named(num_key_value_heads="-", max_position_embeddings="max_position_embedding")
    sizes = decoder_sizes(named, head_dim=256, eps=1e-5)
    latent = config.integer("share_q_dim", default=sizes.head_dim, minimum=1)
    attention = FactorisedAttentionSpec(
        hidden_size=sizes.hidden_size,
        num_heads=sizes.num_heads,
        num_kv_heads=1,
        head_dim=sizes.head_dim,
        scale=sizes.head_dim**-0.5,
        rope=sizes.rope,
        rotary_dim=sizes.rotary_dim,
        q_latent=sizes.rms_norm("inter_norm", latent),
    )
    num_experts, per_token = expert_counts(config, "moe_num_experts", "moe_top_k")
    routing = Routing(top_k=per_token, scoring="softmax", renormalize=config.flag("norm_expert_weight", default=False))
    moe = sizes.moe(
        num_experts,
        config.integer("moe_intermediate_size", minimum=1),
        routing,
        name="moe",
        stacked=StackedExperts(names=("gate_proj.weight", "up_proj.weight", "down_proj.weight")),
        shared=sizes.gated_mlp("share_expert", config.integer("share_expert_dim", minimum=1)),
    )
    sparse = _sparse_layers(config, sizes.num_layers)
    rows = (("q_proj", latent), ("k_proj", sizes.head_dim), ("v_proj", sizes.head_dim))
    return sizes.network(
        (sizes.pre_norm(layer, attention, moe if layer in sparse else None) for layer in sizes.layers),
        checkpoint=CheckpointNames(fused=(FusedRows(module="self_attn.qkv_proj", parts=rows),)),
    )


def _sparse_layers(config: Fields, layers: int) -> frozenset[int]:
    text = config.text("moe_layers_enum", default=None)
    if text is None:
        return frozenset(range(1, layers))
    try:
        return frozenset(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise CheckpointError(f"{config.source}: moe_layers_enum must list layers, as '4,5,6', is {text!r}") from None

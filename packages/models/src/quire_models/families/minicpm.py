"""MiniCPM (Hu et al. 2024, arXiv:2404.06395): Llama with the factors of maximal update parametrisation for embedding,
residuals and logits; and Tele-FLM (Li et al. 2024), which has such factors at both ends."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.decoder_sizes import decoder_sizes, expert_counts
from quire_models.feed_forward_spec import Routing
from quire_models.spec import FeedForwardSpec, HeadSpec, NetworkSpec

__all__ = ["spec", "spec_of_teleflm"]


def spec(config: Fields) -> NetworkSpec:
    """What a part gives is multiplied by `scale_depth` over the root of the number of layers, logits are divided
    by how much wider the network is than `dim_model_base`. MiniCPM-MoE has experts in every layer."""
    sizes = decoder_sizes(config, tied=True)
    feed_forward: FeedForwardSpec = sizes.gated_mlp()
    if config.integer("num_experts", default=0, minimum=0):
        num_experts, per_token = expert_counts(config, "num_experts", "num_experts_per_tok")
        routing = Routing(top_k=per_token, scoring="softmax", renormalize=True)
        feed_forward = sizes.moe(num_experts, sizes.intermediate_size, routing, names=("w1", "w3", "w2"), stacked=None)
    sparse, notes = config.object("sparse_config"), tuple[str, ...]()
    if sparse is not None:
        dense = sparse.integer("dense_len", default=0)
        notes = (f"sparse_config (InfLLM-V2) is not computed: all tokens are seen, beyond dense_len ({dense}), too",)
    base = config.integer("dim_model_base", default=sizes.hidden_size, minimum=1)
    factor = config.number("scale_depth", default=1.0) / sizes.num_layers**0.5
    attention = sizes.attention()
    return sizes.network(
        (sizes.pre_norm(layer, attention, feed_forward, residual_factor=factor) for layer in sizes.layers),
        embedding=sizes.embedding(factor=config.number("scale_emb", default=1.0)),
        head=HeadSpec(tied=sizes.tied, factor=base / sizes.hidden_size),
        notes=notes,
    )


def spec_of_teleflm(config: Fields) -> NetworkSpec:
    """The factors are there where `use_mup` says so."""
    sizes = decoder_sizes(config)
    attention, mlp = sizes.attention(), sizes.gated_mlp()
    has_factors = config.flag("use_mup", default=False)
    scale = config.number("mup_scale_factor", default=1.0, above=0.0)
    inputs, outputs = (config.number(name, default=1.0) for name in ("input_mult", "output_mult"))
    return sizes.network(
        (sizes.pre_norm(layer, attention, mlp) for layer in sizes.layers),
        embedding=sizes.embedding(factor=inputs if has_factors else 1.0),
        head=HeadSpec(tied=sizes.tied, factor=outputs / scale if has_factors else 1.0),
    )

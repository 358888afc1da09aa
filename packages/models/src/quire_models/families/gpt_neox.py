"""GPT-NeoX and Pythia (Black et al. 2022): two layer norms, parts side by side, partial rotation."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.config_fields import ACTIVATIONS
from quire_models.decoder_sizes import decoder_sizes
from quire_models.mixer_spec import ProjectionNames
from quire_models.spec import CheckpointNames, HeadSpec, NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """A quarter of each head is rotated when it is not said otherwise. The LM head has had two names, and the first
    checkpoints hold the causal mask."""
    named = config.named(
        rms_norm_eps="layer_norm_eps",
        num_key_value_heads="-",
        rope_theta="rotary_emb_base",
        partial_rotary_factor="rotary_pct",
    )
    bias = config.flag("attention_bias", default=True)
    sizes = decoder_sizes(named, act="gelu", acts=ACTIVATIONS, partial=0.25, eps=1e-5)
    attention = sizes.attention(name="attention", bias=bias, names=ProjectionNames(out="dense"))
    mlp = sizes.mlp(names=("dense_h_to_4h", "dense_4h_to_h"))
    is_parallel = config.flag("use_parallel_residual", default=True)
    return sizes.network(
        (
            sizes.pre_norm(
                layer,
                attention,
                mlp,
                prefix="gpt_neox.layers",
                norm=sizes.layer_norm,
                arrangement="parallel" if is_parallel else "sequential",
            )
            for layer in sizes.layers
        ),
        body="gpt_neox",
        embedding=sizes.embedding("embed_in"),
        final_norm=sizes.layer_norm("final_layer_norm"),
        head=HeadSpec(name="embed_out", tied=sizes.tied),
        checkpoint=CheckpointNames(
            ignored_suffixes=(".attention.bias", ".attention.masked_bias"),
            renamed=(("lm_head.", "embed_out."),),
            fused=(sizes.fused_heads("attention.query_key_value"),),
        ),
    )

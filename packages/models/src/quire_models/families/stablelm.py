"""StableLM 2 (Bellagente et al. 2024): Llama with layer norms and partial rotation."""

from __future__ import annotations

from typing import Any

from quire_interfaces import Fields
from quire_models.decoder_sizes import decoder_sizes
from quire_models.spec import NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """A quarter of each head is rotated when it is not said otherwise. Each query and key head may have a layer norm of
    its own; both parts may stand side by side behind one norm."""
    sizes = decoder_sizes(config.named(rms_norm_eps="layer_norm_eps"), partial=0.25, eps=1e-5)
    is_parallel = config.flag("use_parallel_residual", default=False)
    heads = {"q": sizes.num_heads, "k": sizes.num_kv_heads}
    norms: dict[str, Any] = {}
    if config.flag("qk_layernorm", default=False):
        norms = {
            f"{part}_norm": sizes.layer_norm(
                f"{part}_layernorm", sizes.head_dim, has_bias=False, num_heads=number, is_listed=True
            )
            for part, number in heads.items()
        }
    attention = sizes.attention(qkv_bias=config.flag("use_qkv_bias", default=False), **norms)
    layers = (
        sizes.pre_norm(
            layer,
            attention,
            norms=("input_layernorm",) if is_parallel else ("input_layernorm", "post_attention_layernorm"),
            norm=sizes.layer_norm,
            arrangement="parallel" if is_parallel else "sequential",
        )
        for layer in sizes.layers
    )
    return sizes.network(layers, final_norm=sizes.layer_norm("norm"))

"""Falcon (Almazrouei et al. 2023): attention and feed-forward side by side, few key-value heads."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from quire_models.falcon.config import FalconConfig
from quire_models.layers.alibi import bloom_slopes
from quire_models.layers.attention import SelfAttention
from quire_models.layers.blocks import ParallelBlock, SequentialBlock
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.fused import split_heads
from quire_models.layers.mlp import MLP
from quire_models.layers.norm import LayerNorm
from quire_models.layers.scope import Scope

__all__ = ["FalconForCausalLM"]


def make_layer(config: FalconConfig, layer: int, scope: Scope) -> ParallelBlock | SequentialBlock:
    """One layer."""
    hidden, eps = config.hidden_size, config.rms_norm_eps
    inner, rotated, slopes = scope / "self_attention", not config.alibi, None
    if config.alibi:
        # As bfloat16 holds them, and scaled like the scores: so the class does.
        slopes = bloom_slopes(config.num_heads).bfloat16().float().to(scope.device) * config.head_dim**-0.5
    attention = SelfAttention(config, layer, inner, rotated=rotated, alibi_slopes=slopes, out="dense")
    mlp = MLP(
        scope / "mlp",
        hidden,
        config.intermediate_size,
        act=config.hidden_act,
        bias=config.mlp_bias,
        names=("dense_h_to_4h", "dense_4h_to_h"),
    )
    if not config.is_parallel:
        input_norm = LayerNorm(scope / "input_layernorm", hidden, eps)
        mlp_norm = LayerNorm(scope / "post_attention_layernorm", hidden, eps)
        return SequentialBlock(input_norm=input_norm, mixer=attention, feed_forward_norm=mlp_norm, feed_forward=mlp)
    if config.num_norms == 1:
        input_norm = LayerNorm(scope / "input_layernorm", hidden, eps)
        return ParallelBlock(input_norm=input_norm, mixer=attention, feed_forward=mlp)
    input_norm, mlp_norm = LayerNorm(scope / "ln_attn", hidden, eps), LayerNorm(scope / "ln_mlp", hidden, eps)
    return ParallelBlock(input_norm=input_norm, mixer=attention, feed_forward=mlp, feed_forward_norm=mlp_norm)


class FalconForCausalLM(DecoderLM):
    """The Falcon network."""

    def __init__(self, config: FalconConfig, scope: Scope) -> None:
        super().__init__(
            config,
            scope,
            make_layer,
            LayerNorm,
            body="transformer",
            embedding="word_embeddings",
            layers="h",
            norm="ln_f",
        )

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Takes heads apart, which are stored group by group."""
        config = self.config
        return split_heads(
            name,
            tensor,
            "query_key_value",
            head_dim=config.head_dim,
            num_kv_heads=config.num_kv_heads,
            queries_per_kv_head=config.num_heads // config.num_kv_heads,
        )

"""Bloom (BigScience 2022): GPT with ALiBi slopes instead of positions, and a norm behind the embedding."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.config import ModelConfig
from quire_models.layers.alibi import bloom_slopes
from quire_models.layers.attention import SelfAttention
from quire_models.layers.blocks import SequentialBlock
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.fused import split_heads
from quire_models.layers.mlp import MLP
from quire_models.layers.norm import LayerNorm
from quire_models.layers.scope import Scope

__all__ = ["BloomForCausalLM"]


def make_layer(config: ModelConfig, layer: int, scope: Scope) -> SequentialBlock:
    """One layer."""
    hidden, eps = config.hidden_size, config.rms_norm_eps
    slopes = bloom_slopes(config.num_heads).to(scope.device)
    names = ("dense_h_to_4h", "dense_4h_to_h")
    return SequentialBlock(
        input_norm=LayerNorm(scope / "input_layernorm", hidden, eps),
        mixer=SelfAttention(config, layer, scope / "self_attention", rotated=False, alibi_slopes=slopes, out="dense"),
        feed_forward_norm=LayerNorm(scope / "post_attention_layernorm", hidden, eps),
        feed_forward=MLP(scope / "mlp", hidden, config.intermediate_size, act=config.hidden_act, names=names),
    )


class BloomForCausalLM(DecoderLM):
    """The Bloom network."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
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
        inner = self.body / "word_embeddings_layernorm"
        self.embedding_norm = LayerNorm(inner, config.hidden_size, config.rms_norm_eps)

    def embed(self, batch: ForwardBatch) -> Tensor:
        """The embedding, normalised."""
        return self.embedding_norm(super().embed(batch))

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Takes heads apart; the first checkpoints have no prefix."""
        if not name.startswith(("transformer.", "lm_head.")):
            name = f"transformer.{name}"
        config = self.config
        return split_heads(name, tensor, "query_key_value", head_dim=config.head_dim, num_kv_heads=config.num_kv_heads)

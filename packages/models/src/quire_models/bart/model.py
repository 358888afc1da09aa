"""BART (Lewis et al. 2019) and mBART (Liu et al. 2020): an encoder and a decoder with learned positions."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from quire_attention import EncoderBatch, ForwardBatch
from quire_models.bart.config import POSITION_OFFSET, BartConfig
from quire_models.layers.attention import SelfAttention
from quire_models.layers.encoder import CrossAttention, EncoderAttention
from quire_models.layers.encoder_decoder import EncoderDecoderLM
from quire_models.layers.linear import Embedding, LMHead
from quire_models.layers.mlp import MLP
from quire_models.layers.norm import LayerNorm
from quire_models.layers.scope import Scope
from quire_ops import LoraTokens

__all__ = ["BartForConditionalGeneration"]


class BartEncoderLayer:
    """Attention and a feed-forward network; norms behind each addition, or before each part."""

    def __init__(self, config: BartConfig, scope: Scope) -> None:
        hidden, eps, heads = config.hidden_size, config.rms_norm_eps, config.encoder_num_heads
        self.attention = EncoderAttention(scope / "self_attn", hidden, heads, hidden // heads, bias=True)
        self.attention_norm = LayerNorm(scope / "self_attn_layer_norm", hidden, eps)
        self.mlp = MLP(scope, hidden, config.encoder_intermediate_size, act=config.hidden_act)
        self.mlp_norm = LayerNorm(scope / "final_layer_norm", hidden, eps)
        self.norms_first = config.norms_first

    def __call__(self, x: Tensor, batch: EncoderBatch) -> Tensor:
        if self.norms_first:
            x = x + self.attention(self.attention_norm(x), batch)
            return x + self.mlp(self.mlp_norm(x))
        x = self.attention_norm(x + self.attention(x, batch))
        return self.mlp_norm(x + self.mlp(x))


class BartDecoderLayer:
    """The same, with attention to what the encoder read between the two."""

    def __init__(self, config: BartConfig, layer: int, scope: Scope) -> None:
        hidden, eps, heads = config.hidden_size, config.rms_norm_eps, config.num_heads
        self.attention = SelfAttention(config, layer, scope / "self_attn", rotated=False, out="out_proj")
        self.attention_norm = LayerNorm(scope / "self_attn_layer_norm", hidden, eps)
        index = config.num_layers + layer
        self.cross = CrossAttention(scope / "encoder_attn", index, hidden, heads, config.head_dim, bias=True)
        self.cross_norm = LayerNorm(scope / "encoder_attn_layer_norm", hidden, eps)
        self.mlp = MLP(scope, hidden, config.intermediate_size, act=config.hidden_act)
        self.mlp_norm = LayerNorm(scope / "final_layer_norm", hidden, eps)
        self.norms_first = config.norms_first

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        if self.norms_first:
            x = x + self.attention(self.attention_norm(x), x, x, batch)
            x = x + self.cross(self.cross_norm(x), batch)
            return x + self.mlp(self.mlp_norm(x))
        x = self.attention_norm(x + self.attention(x, x, x, batch))
        x = self.cross_norm(x + self.cross(x, batch))
        return self.mlp_norm(x + self.mlp(x))


class BartEmbedding:
    """Tokens and positions of one stack, normalised."""

    def __init__(self, config: BartConfig, scope: Scope, tokens: Embedding) -> None:
        rows = config.max_model_len + POSITION_OFFSET
        self.tokens, self.scale = tokens, config.embedding_scale
        self.positions = Embedding(scope / "embed_positions", rows, config.hidden_size)
        self.norm = LayerNorm(scope / "layernorm_embedding", config.hidden_size, config.rms_norm_eps)

    def __call__(self, input_ids: Tensor, positions: Tensor, lora: LoraTokens | None) -> Tensor:
        return self.norm(self.tokens(input_ids, lora) * self.scale + self.positions(positions + POSITION_OFFSET))


class BartForConditionalGeneration(EncoderDecoderLM):
    """The network."""

    ignored_tensors = frozenset(
        {"lm_head.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"}
    )

    def __init__(self, config: BartConfig, scope: Scope) -> None:
        super().__init__(config, scope)
        encoder, decoder = scope / "model" / "encoder", scope / "model" / "decoder"
        hidden, eps = config.hidden_size, config.rms_norm_eps
        tokens = Embedding(scope / "model" / "shared", config.vocab_size, hidden)
        self.encoder_embedding = BartEmbedding(config, encoder, tokens)
        self.encoder_layers = [
            BartEncoderLayer(config, encoder / "layers" / str(i)) for i in range(config.num_encoder_layers)
        ]
        self.decoder_embedding = BartEmbedding(config, decoder, tokens)
        self.decoder_layers = [
            BartDecoderLayer(config, i, decoder / "layers" / str(i)) for i in range(config.num_layers)
        ]
        self.encoder_norm = LayerNorm(encoder / "layer_norm", hidden, eps) if config.norms_first else None
        self.decoder_norm = LayerNorm(decoder / "layer_norm", hidden, eps) if config.norms_first else None
        self.lm_head = LMHead(scope / "lm_head", config.vocab_size, hidden, tied_to=tokens, bias=True)

    def embed(self, input_ids: Tensor, positions: Tensor, lora: LoraTokens | None, *, decoder: bool) -> Tensor:
        """See `EncoderDecoderLM.embed`."""
        return (self.decoder_embedding if decoder else self.encoder_embedding)(input_ids, positions, lora)

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """The bias of the logits has a name of its own."""
        if name == "final_logits_bias":
            return (("lm_head.bias", torch.squeeze(tensor, 0)),)
        return ((name, tensor),)

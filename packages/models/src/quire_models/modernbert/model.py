"""ModernBERT (Warner et al. 2024): rotary positions, gates, and windows in most layers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from quire_attention import EncoderBatch
from quire_models.layers.activations import activation
from quire_models.layers.encoder import EncoderAttention, ProjectionNames
from quire_models.layers.encoder_only import EncoderOnly
from quire_models.layers.linear import Embedding, Linear
from quire_models.layers.norm import LayerNorm
from quire_models.layers.rotary import Rotary, RotaryTable
from quire_models.layers.scope import Scope
from quire_models.modernbert.config import ModernBertConfig

__all__ = ["ModernBertModel"]

NAMES = ProjectionNames("query", "key", "value", "Wo")


class ModernBertLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)); before the first attention there is no norm."""

    def __init__(self, config: ModernBertConfig, layer: int, scope: Scope) -> None:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.window = config.sliding_windows[layer]
        self.attention_norm = None if layer == 0 else _norm(config, scope / "attn_norm")
        self.attention = EncoderAttention(
            scope / "attn",
            hidden,
            config.num_heads,
            config.head_dim,
            bias=config.qkv_bias,
            window=self.window,
            names=NAMES,
        )
        self.rotary = Rotary(scope, config.rotary_dim)
        self.mlp_norm = _norm(config, scope / "mlp_norm")
        self.gate = Linear(scope / "mlp" / "gate", hidden, inner, bias=bias)
        self.up = Linear(scope / "mlp" / "up", hidden, inner, bias=bias)
        self.down = Linear(scope / "mlp" / "Wo", inner, hidden, bias=bias)
        self.act = activation(scope, config.hidden_act)

    def __call__(self, x: Tensor, batch: EncoderBatch, cos: Tensor, sin: Tensor) -> Tensor:
        normed = x if self.attention_norm is None else self.attention_norm(x)
        x = x + self.attention(normed, batch, rotate=lambda heads: self.rotary(heads, cos, sin))
        normed = self.mlp_norm(x)
        return x + self.down(self.act(self.gate(normed)) * self.up(normed))


class ModernBertModel(EncoderOnly):
    """The network, without what stands behind its hidden states."""

    def __init__(self, config: ModernBertConfig, scope: Scope) -> None:
        super().__init__(config, scope)
        self.tokens = Embedding(scope / "embeddings" / "tok_embeddings", config.vocab_size, config.hidden_size)
        self.embedding_norm = _norm(config, scope / "embeddings" / "norm")
        self.layers = [ModernBertLayer(config, i, scope / "layers" / str(i)) for i in range(config.num_layers)]
        self.final_norm = _norm(config, scope / "final_norm")
        self.tables = [
            RotaryTable(rope, config.rotary_dim, dtype=scope.dtype, device=scope.device)
            for rope in (config.rope, config.local_rope)
        ]

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Takes apart what stands in one matrix: queries, keys and values; gate and what it is for."""
        for fused, parts in (("Wqkv", NAMES[:3]), ("Wi", ("gate", "up"))):
            if f".{fused}." in name:
                pieces = tensor.chunk(len(parts))
                return [(name.replace(fused, part), piece) for part, piece in zip(parts, pieces, strict=True)]
        return ((name, tensor),)

    @torch.inference_mode()
    def encode_batch(self, batch: EncoderBatch) -> Tensor:
        """See `EncoderOnly.encode_batch`."""
        whole, local = (table(batch.positions, max(batch.lens)) for table in self.tables)
        x = self.embedding_norm(self.tokens(batch.input_ids))
        for layer in self.layers:
            x = layer(x, batch, *(whole if layer.window is None else local))
        return self.final_norm(x)


def _norm(config: ModernBertConfig, scope: Scope) -> LayerNorm:
    return LayerNorm(scope, config.hidden_size, config.rms_norm_eps, bias=config.has_norm_bias)

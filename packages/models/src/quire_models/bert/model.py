"""BERT (Devlin et al. 2019), and RoBERTa and XLM-RoBERTa, whose positions begin elsewhere in the table."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from quire_attention import EncoderBatch
from quire_models.bert.config import BertConfig
from quire_models.layers.encoder import EncoderAttention, ProjectionNames
from quire_models.layers.encoder_only import EncoderOnly
from quire_models.layers.linear import Embedding
from quire_models.layers.mlp import MLP
from quire_models.layers.norm import LayerNorm
from quire_models.layers.scope import Scope

__all__ = ["BertModel"]

NAMES = ProjectionNames("self.query", "self.key", "self.value", "output.dense")


class BertLayer:
    """Attention and a feed-forward network; a norm behind each addition."""

    def __init__(self, config: BertConfig, scope: Scope) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.attention = EncoderAttention(
            scope / "attention", hidden, config.num_heads, config.head_dim, bias=True, names=NAMES
        )
        self.attention_norm = LayerNorm(scope / "attention" / "output" / "LayerNorm", hidden, eps)
        names = ("intermediate.dense", "output.dense")
        self.mlp = MLP(scope, hidden, config.intermediate_size, act=config.hidden_act, names=names)
        self.mlp_norm = LayerNorm(scope / "output" / "LayerNorm", hidden, eps)

    def __call__(self, x: Tensor, batch: EncoderBatch) -> Tensor:
        x = self.attention_norm(x + self.attention(x, batch))
        return self.mlp_norm(x + self.mlp(x))


class BertModel(EncoderOnly):
    """The network, without what stands behind its hidden states."""

    def __init__(self, config: BertConfig, scope: Scope) -> None:
        super().__init__(config, scope)
        hidden, embeddings = config.hidden_size, scope / "embeddings"
        rows = config.max_encoder_len + config.position_offset
        self.tokens = Embedding(embeddings / "word_embeddings", config.vocab_size, hidden)
        self.positions = Embedding(embeddings / "position_embeddings", rows, hidden)
        self.kinds = Embedding(embeddings / "token_type_embeddings", config.num_kinds, hidden)
        self.norm = LayerNorm(embeddings / "LayerNorm", hidden, config.rms_norm_eps)
        self.layers = [BertLayer(config, scope / "encoder" / "layer" / str(i)) for i in range(config.num_layers)]
        self.offset = config.position_offset

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Leaves out the pooler, and what older files keep of positions."""
        return () if name.startswith("pooler.") or name == "embeddings.position_ids" else ((name, tensor),)

    @torch.inference_mode()
    def encode_batch(self, batch: EncoderBatch) -> Tensor:
        """See `EncoderOnly.encode_batch`."""
        x = self.tokens(batch.input_ids) + self.kinds(torch.zeros_like(batch.input_ids))
        x = self.norm(x + self.positions(batch.positions + self.offset))
        for layer in self.layers:
            x = layer(x, batch)
        return x

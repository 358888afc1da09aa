"""Multi-token prediction (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2) as a drafting head: one more
decoder layer of the model's own kind, which the checkpoint has behind the last one.

It reads embedding and hidden state, each normalised, side by side through a projection. Embedding and LM head are the
target's (eq. 22 and 23); what checkpoints have of them beside this layer are copies. Of several such layers the first
one goes on from its own states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.build import build_layer
from quire_models.config import ModelConfig
from quire_models.layers.decoder_lm import rotary_tables
from quire_models.layers.linear import Linear
from quire_models.layers.make_norm import make_norm
from quire_models.layers.scope import Scope
from quire_models.mtp.config import MtpSpec
from quire_models.mtp.head import FurtherTokenHead
from quire_ops import LoraTokens

__all__ = ["MtpHead"]


class MtpHead(FurtherTokenHead):
    """The layer, loaded from the target's checkpoint."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope)
        spec = config.network
        assert isinstance(spec, MtpSpec)
        assert spec.final_norm is not None
        body = scope / spec.body
        self._prefix = body.prefix
        self.enorm, self.hnorm = make_norm(spec.embedding_norm, body), make_norm(spec.hidden_norm, body)
        # Quantized checkpoints keep the projection as numbers.
        inputs, outputs = spec.projection.in_features, spec.projection.out_features
        self.eh_proj = Linear(dataclasses.replace(body, quantization=None) / spec.projection.name, inputs, outputs)
        self.layer = build_layer(spec.layers[0], 0, scope / spec.layers[0].name)
        self.norm = make_norm(spec.final_norm, body)
        self.rotary = rotary_tables(spec.layers, scope)[0][0]

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """What stands in the layer, without copies of the target's embedding and LM head."""
        within = name.removeprefix(self._prefix)
        copies = ("embed_tokens.", "shared_head.head.")
        return () if within == name or within.startswith(copies) else ((name, tensor),)

    @torch.inference_mode()
    def advance(self, batch: ForwardBatch, states: Tensor) -> Tensor:
        """See `DraftHead.advance`."""
        cos, sin = self.rotary(batch.positions, max(batch.num_positions, *batch.attention[0].kv_lens))
        embedded = self.enorm(self.target.embedding(batch.input_ids))
        x = self.eh_proj(torch.cat((embedded, self.hnorm(states)), dim=-1))
        x, residual = self.layer(x, None, cos, sin, batch)
        return x if residual is None else x + residual

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor, lora: LoraTokens | None = None) -> Tensor:
        """States [N, H] -> logits [N, vocab_size] float32."""
        return self.target.lm_head(self.norm(hidden), lora)

    @torch.inference_mode()
    def argmax(self, hidden: Tensor, lora: LoraTokens | None = None) -> tuple[Tensor, Tensor]:
        """See `Network.argmax`."""
        return self.target.lm_head.argmax(self.norm(hidden), lora)

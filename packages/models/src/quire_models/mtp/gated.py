"""Multi-token prediction as Qwen3-Next and Qwen3.5 have it (`mtp.*` in their checkpoints): a layer with gated
attention, between norms of its own. See `model.py` for what such a layer is.

What its last norm gives stands for the target's hidden states, which come from behind a norm, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.build import build_layer
from quire_models.config import ModelConfig
from quire_models.layers.add_norm import AddNorm
from quire_models.layers.decoder_lm import rotary_tables
from quire_models.layers.linear import Linear
from quire_models.layers.make_norm import make_norm
from quire_models.layers.scope import Scope
from quire_models.mtp.config import GatedMtpSpec
from quire_models.mtp.head import FurtherTokenHead
from quire_ops import LoraTokens

__all__ = ["GatedMtpHead"]


class GatedMtpHead(FurtherTokenHead):
    """The layer, loaded from the target's checkpoint."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope)
        spec = config.network
        assert isinstance(spec, GatedMtpSpec)
        assert spec.final_norm is not None
        body = scope / spec.body
        self._prefix = body.prefix
        self.embedding_norm, self.hidden_norm = make_norm(spec.embedding_norm, body), make_norm(spec.hidden_norm, body)
        # Quantized checkpoints keep the projection as numbers.
        inputs, outputs = spec.projection.in_features, spec.projection.out_features
        self.fc = Linear(dataclasses.replace(body, quantization=None) / spec.projection.name, inputs, outputs)
        self.layer = build_layer(spec.layers[0], 0, scope / spec.layers[0].name)
        self.add_norm = AddNorm(make_norm(spec.final_norm, body))
        self.rotary = rotary_tables(spec.layers, scope)[0][0]

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """What stands in the first of these layers, and around them."""
        within = name.removeprefix(self._prefix)
        is_other_layer = within.startswith("layers.") and not within.startswith("layers.0.")
        return () if within == name or is_other_layer else ((name, tensor),)

    @torch.inference_mode()
    def advance(self, batch: ForwardBatch, states: Tensor) -> Tensor:
        """See `DraftHead.advance`."""
        cos, sin = self.rotary(batch.positions, max(batch.num_positions, *batch.attention[0].kv_lens))
        embedded = self.embedding_norm(self.target.embedding(batch.input_ids))
        x = self.fc(torch.cat((embedded, self.hidden_norm(states)), dim=-1))
        hidden: Tensor = self.add_norm(*self.layer(x, None, cos, sin, batch))[0]
        return hidden

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor, lora: LoraTokens | None = None) -> Tensor:
        """States [N, H] -> logits [N, vocab_size] float32."""
        return self.target.lm_head(hidden, lora)

    @torch.inference_mode()
    def argmax(self, hidden: Tensor, lora: LoraTokens | None = None) -> tuple[Tensor, Tensor]:
        """See `Network.argmax`."""
        return self.target.lm_head.argmax(hidden, lora)

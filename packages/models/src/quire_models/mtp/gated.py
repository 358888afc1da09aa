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
from quire_models.delta_config import GatedDeltaConfig
from quire_models.layers.add_norm import AddNorm
from quire_models.layers.linear import Linear
from quire_models.layers.norm import OffsetRMSNorm
from quire_models.layers.rotary import RotaryTable
from quire_models.layers.scope import Scope
from quire_models.mtp.head import FurtherTokenHead
from quire_models.qwen2_moe.model import make_moe
from quire_models.qwen3_next.config import Qwen3NextConfig
from quire_models.qwen3_next.model import delta_layer
from quire_ops import LoraTokens

__all__ = ["GatedMtpHead"]


class GatedMtpHead(FurtherTokenHead):
    """The layer, loaded from the target's checkpoint."""

    def __init__(self, config: GatedDeltaConfig, scope: Scope) -> None:
        super().__init__(config, scope)
        size, eps, body = config.hidden_size, config.rms_norm_eps, scope / "mtp"
        self._prefix = body.prefix
        self.embedding_norm = OffsetRMSNorm(body / "pre_fc_norm_embedding", size, eps)
        self.hidden_norm = OffsetRMSNorm(body / "pre_fc_norm_hidden", size, eps)
        # Quantized checkpoints keep the projection as numbers.
        self.fc = Linear(dataclasses.replace(body, quantization=None) / "fc", 2 * size, size)
        inner, experts = body / "layers" / "0", None
        if isinstance(config, Qwen3NextConfig) and config.sparse_layers[0]:
            experts = make_moe(config, inner / "mlp")
        self.layer = delta_layer(config, 0, inner, feed_forward=experts)
        self.add_norm = AddNorm(OffsetRMSNorm(body / "norm", size, eps))
        self.rotary = RotaryTable(config.rope, config.rotary_dim, dtype=scope.dtype, device=scope.device)

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

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
from quire_interfaces import CheckpointError
from quire_models.build import build_layer
from quire_models.config import ModelConfig
from quire_models.draft_heads.head import DraftHead
from quire_models.draft_heads.mtp_config import MtpSpec
from quire_models.layers.add_norm import AddNorm
from quire_models.layers.decoder_lm import DecoderLM, rotary_tables
from quire_models.layers.linear import Linear
from quire_models.layers.network import Network
from quire_models.layers.norm import make_norm
from quire_models.layers.scope import Scope
from quire_ops import LoraTokens

__all__ = ["MtpHead"]


class MtpHead(DraftHead):
    """The layer, loaded from the target's checkpoint."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope)
        spec = config.network
        assert isinstance(spec, MtpSpec)
        assert spec.final_norm is not None
        body = scope / spec.body
        self._prefix, self._has_normed_states = body.prefix, spec.has_normed_states
        self._embedding_norm, self._hidden_norm = (
            make_norm(norm, body) for norm in (spec.embedding_norm, spec.hidden_norm)
        )
        # Quantized checkpoints keep the projection as numbers.
        inputs, outputs = spec.projection.in_features, spec.projection.out_features
        self._projection = Linear(dataclasses.replace(body, quantization=None) / spec.projection.name, inputs, outputs)
        self._layer = build_layer(spec.layers[0], 0, scope / spec.layers[0].name)
        self._norm = make_norm(spec.final_norm, body)
        self._add_norm = AddNorm(self._norm)
        self._rotary = rotary_tables(spec.layers, scope)[0][0]
        self._target: DecoderLM | None = None

    def join(self, target: Network) -> None:
        """Take embedding and LM head from the target.

        Raises:
            CheckpointError: The two do not belong together.
        """
        if not isinstance(target, DecoderLM) or target.config.hidden_size != self.config.hidden_size:
            raise CheckpointError(f"{target.config.architecture} is not what this layer predicts further tokens for")
        self._target = target

    @property
    def target(self) -> DecoderLM:
        """The network that it was joined with."""
        assert self._target is not None, "join was not called"
        return self._target

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Tensors of the first such layer and of what stands around it, without copies of the target's embedding and LM
        head."""
        names = self.config.language_names
        name = (None if names is None else names(name)) or name
        within = name.removeprefix(self._prefix)
        is_copy = within.startswith(("embed_tokens.", "shared_head.head."))
        is_other_layer = within.startswith("layers.") and not within.startswith("layers.0.")
        return () if within == name or is_copy or is_other_layer else ((name, tensor),)

    @torch.inference_mode()
    def advance(self, batch: ForwardBatch, states: Tensor) -> Tensor:
        """One pass: states [T, H] of the positions before -> states [T, H]."""
        cos, sin = self._rotary(batch.positions, max(batch.num_positions, *batch.attention[0].kv_lens))
        embedded = self._embedding_norm(self.target.embedding(batch.input_ids))
        x = self._projection(torch.cat((embedded, self._hidden_norm(states)), dim=-1))
        x, residual = self._layer(x, None, cos, sin, batch)
        if self._has_normed_states:
            hidden: Tensor = self._add_norm(x, residual)[0]
            return hidden
        return x if residual is None else x + residual

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor, lora: LoraTokens | None = None) -> Tensor:
        """States [N, H] -> logits [N, vocab_size] float32."""
        return self.target.lm_head(self._head_input(hidden), lora)

    @torch.inference_mode()
    def argmax(self, hidden: Tensor, lora: LoraTokens | None = None) -> tuple[Tensor, Tensor]:
        """States [N, H] -> the largest logit's token [N] int64, and that logit [N] float32."""
        return self.target.lm_head.argmax(self._head_input(hidden), lora)

    def _head_input(self, hidden: Tensor) -> Tensor:
        return hidden if self._has_normed_states else self._norm(hidden)

"""What every decoder-only network has around its layers: embedding, the stack, the final norm, the LM head.

Shape legend: T tokens of the step, N rows that need logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.config import ModelConfig
from quire_models.layers.fused_decoder import FusedDecoder
from quire_models.layers.invariance import promised_by_ops
from quire_models.layers.linear import Embedding, LMHead
from quire_models.layers.network import Network
from quire_models.layers.norm import AddRMSNorm
from quire_models.layers.rotary import RotaryTable
from quire_models.layers.scope import Scope
from quire_ops import DecoderLayerWeights, DecodeRows, LoraTokens, RunDecode
from quire_ops.ops import op_named

__all__ = ["CausalLM", "DecoderLayer"]


class DecoderLayer(Protocol):
    """One layer of the stack."""

    def stack_weights(self) -> DecoderLayerWeights | None:
        """The layer as data for op `decoder_stack`, or None when that op cannot compute it."""

    def __call__(
        self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """(x, residual) [T, hidden_size] each -> the same for the next layer; their sum is the residual stream.
        `residual` is None in the first layer, and may be written over."""


class CausalLM(Network):
    """A decoder-only network of pre-norm layers with RMS norms, which one call can run where a backend has that."""

    def __init__(
        self,
        config: ModelConfig,
        scope: Scope,
        make_layer: Callable[[Any, int, Scope], DecoderLayer],
    ) -> None:
        """Args:
        scope: What layers get from outside; collects the parameters.
        make_layer: (config, index of the layer, scope of the layer) -> the layer.
        """
        super().__init__(config, scope)
        self.ignored_tensors = frozenset({"lm_head.weight"} if config.tie_word_embeddings else ())
        body = scope / "model"
        self.embed_tokens = Embedding(body / "embed_tokens", config.vocab_size, config.hidden_size)
        self.layers = [make_layer(config, i, body / "layers" / str(i)) for i in range(config.num_layers)]
        self.norm = AddRMSNorm(body / "norm", config.hidden_size, config.rms_norm_eps)
        tied_to = self.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = LMHead(scope / "lm_head", config.vocab_size, config.hidden_size, tied_to=tied_to)
        self.rotary = RotaryTable(config.rope, config.rotary_dim, dtype=scope.dtype, device=scope.device)

    @property
    def batch_invariant(self) -> bool:
        """Logits depend on nothing but the tokens before them: not on other requests, chunks, or what was cached.
        Promised where one call runs the whole stack, since what is outside of it acts on each element alone, and where
        every op that layers call promises it for itself."""
        if self._stack is None:
            return promised_by_ops(self._scope)
        return self._stack.batch_invariant and self._scope.choose(op_named(self.lm_head.op)).batch_invariant

    def finish_loading(self, after_each: Callable[[], None] = lambda: None) -> None:
        """See `Network.finish_loading`."""
        super().finish_loading(after_each)
        layers = [layer.stack_weights() for layer in self.layers]
        self._stack = FusedDecoder.bind(self._scope, self.config, layers, self.norm)

    def bind_decode(self, rows: DecodeRows) -> RunDecode | None:
        """See `Network.bind_decode`."""
        if self._stack is None:
            return None
        return self._stack.bind_decode(rows, self.embed_tokens, self.lm_head, [self.rotary.up_to])

    def forward(self, batch: ForwardBatch) -> Tensor:
        """[T] tokens -> hidden states [T, hidden_size] after the final norm; writes the step's keys and values."""
        return self._forward(batch, {})

    def forward_with_features(self, batch: ForwardBatch, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """See `Network.forward_with_features`."""
        shape = (len(batch.input_ids), self.config.hidden_size)
        taps = {layer: torch.empty(shape, dtype=self.dtype, device=self.device) for layer in layers}
        hidden = self._forward(batch, taps)
        return hidden, torch.cat([taps[layer] for layer in layers], dim=-1)

    def _forward(self, batch: ForwardBatch, taps: dict[int, Tensor]) -> Tensor:
        self.use_adapters(batch.lora)
        cos, sin = self.rotary(batch.positions, max(batch.attention[0].kv_lens))
        x = self.embed_tokens(batch.input_ids, batch.lora)
        if self._stack is not None and self._stack.reads(batch.kv_caches[0]):
            return self._stack(x, [(cos, sin)], batch, taps)
        residual: Tensor | None = None
        for i, layer in enumerate(self.layers):
            if i in taps:
                taps[i].copy_(x if residual is None else x + residual)
            x, residual = layer(x, residual, cos, sin, batch)
        assert residual is not None
        if len(self.layers) in taps:
            taps[len(self.layers)].copy_(x + residual)
        return self.norm(x, residual)[0]

    def compute_logits(self, hidden: Tensor, lora: LoraTokens | None = None) -> Tensor:
        """Hidden states [N, hidden_size] -> logits [N, vocab_size] float32, with the adapters of `lora`."""
        return self.lm_head(hidden, lora)

    def argmax(self, hidden: Tensor, lora: LoraTokens | None = None) -> tuple[Tensor, Tensor]:
        """Hidden states [N, hidden_size] -> the largest logit's token [N] and that logit [N]; logits need not be
        written."""
        return self.lm_head.argmax(hidden, lora)

"""What every decoder-only network has around its layers: embedding, the stack, the final norm, the LM head.

Shape legend: T tokens of the step, N rows that need logits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.config import ModelConfig
from quire_models.layers.invariance import promised_by_ops
from quire_models.layers.linear import Embedding, LMHead
from quire_models.layers.network import Network
from quire_models.layers.norm import AddRMSNorm
from quire_models.layers.rotary import RotaryTable
from quire_models.layers.scope import Scope
from quire_ops import (
    DecodeNetwork,
    DecoderLayerWeights,
    DecodeRows,
    DecoderStack,
    GatedWeights,
    OpBackend,
    RunDecode,
    RunDecoder,
)
from quire_ops.kv_format import QUANTIZED

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
        self._stack: DecoderStack | None = None
        self._run_stack: RunDecoder | None = None
        self.rotary = RotaryTable(config.rope, config.rotary_dim, dtype=scope.dtype, device=scope.device)

    @property
    def batch_invariant(self) -> bool:
        """Logits depend on nothing but the tokens before them: not on other requests, chunks, or what was cached.
        Promised where one call runs the whole stack, since what is outside of it acts on each element alone, and where
        every op that layers call promises it for itself."""
        if self._run_stack is None:
            return promised_by_ops(self._scope)
        return all(self._scope.choose(op)[0].batch_invariant for op in ("decoder_stack", self.lm_head.op))

    @property
    def host_lengths(self) -> tuple[str, ...]:
        """See `Network.host_lengths`."""
        return super().host_lengths if self._run_stack is None else ("op decoder_stack",)

    def finish_loading(self, after_each: Callable[[], None] = lambda: None) -> None:
        """See `Network.finish_loading`."""
        super().finish_loading(after_each)
        self._run_stack = self._bind_stack()

    def _bind_stack(self) -> RunDecoder | None:
        """The whole stack in one call, where a backend of op `decoder_stack` serves beside its `paged_attention`."""
        backend = self._choose("decoder_stack")
        if backend is None:
            return None
        self._stack = self._stack_as_data()
        if self._stack is None:
            return None
        run: RunDecoder = backend.function(self._stack)
        return run

    def _choose(self, op: str) -> OpBackend | None:
        """The backend of an op that takes the whole stack, if it is the one that serves attention."""
        config = self.config
        sizes = {"head_dim": config.head_dim, "queries_per_kv_head": config.num_heads // config.num_kv_heads}
        backend, _ = self._scope.choose(op, **sizes)
        return backend if backend.name == self.attention_backend.name else None

    def _reads(self, kv_cache: Tensor) -> bool:
        """Whether the ops that take the whole stack read such a cache."""
        return kv_cache.dtype == self.dtype or kv_cache.dtype in QUANTIZED

    def _stack_as_data(self) -> DecoderStack | None:
        config = self.config
        layers = [layer.stack_weights() for layer in self.layers]
        if None in layers or not _alike(layers):
            return None
        return DecoderStack(
            layers=tuple(
                dataclasses.replace(layer, kv_scale=attention.kv_scale)
                for layer, attention in zip(layers, self._scope.attentions.values(), strict=True)
                if layer is not None
            ),
            final_norm=self.norm.weight,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            scale=config.head_dim**-0.5,
            activation=config.hidden_act,
        )

    def bind_decode(self, rows: DecodeRows) -> RunDecode | None:
        """See `Network.bind_decode`: op `decode_step`, where a backend serves it beside its `decoder_stack`."""
        backend, head = self._choose("decode_step"), self.lm_head.stack_weights()
        if backend is None or self._stack is None or head is None or not self._reads(rows.kv_caches[0]):
            return None
        network = DecodeNetwork(
            embedding=self.embed_tokens.weight, stack=self._stack, head=head, rotations=self.rotary.up_to
        )
        run: RunDecode = backend.function(network, rows)
        return run

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
        cos, sin = self.rotary(batch.positions, max(batch.attention[0].kv_lens))
        x = self.embed_tokens(batch.input_ids)
        if self._run_stack is not None and self._reads(batch.kv_caches[0]):
            lora = None if self.adapters is None else self.adapters.tokens
            return self._run_stack(
                x, cos, sin, batch.attention, batch.group_of_layer, batch.kv_caches, lora=lora, taps=taps
            )
        residual: Tensor | None = None
        for i, layer in enumerate(self.layers):
            if i in taps:
                taps[i].copy_(x if residual is None else x + residual)
            x, residual = layer(x, residual, cos, sin, batch)
        assert residual is not None
        if len(self.layers) in taps:
            taps[len(self.layers)].copy_(x + residual)
        return self.norm(x, residual)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [N, hidden_size] -> logits [N, vocab_size] float32."""
        return self.lm_head(hidden)

    def most_likely(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See `Network.most_likely`; logits need not be written."""
        return self.lm_head.most_likely(hidden)


def _alike(layers: list[DecoderLayerWeights | None]) -> bool:
    """Whether all matrices but those of experts are kept in one way, as far as op `decoder_stack` asks for that."""
    forms = set()
    for layer in layers:
        assert layer is not None
        matrices = [layer.q, layer.k, layer.v, layer.o]
        if isinstance(gated := layer.feed_forward, GatedWeights):
            matrices += gated
            gate, up = (None if one.scale is None else one.scale.shape for one in (gated.gate, gated.up))
            if gate != up:
                return False
        for one in matrices:
            forms.add((one.weight.dtype, None if one.scale is None else one.scale.ndim, one.input_scale is None))
    return len(forms) == 1

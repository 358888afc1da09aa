"""A decoder-only network whose layers map the residual stream to the residual stream, in whatever way they like.

`CausalLM` is its sibling for plain pre-norm stacks, whose additions are fused with the norms behind them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.config import ModelConfig
from quire_models.layers.activations import activation
from quire_models.layers.blocks import StackedBlock
from quire_models.layers.fused_decoder import FusedDecoder
from quire_models.layers.invariance import promised_by_ops
from quire_models.layers.linear import Embedding, LMHead
from quire_models.layers.network import Network
from quire_models.layers.norm import OffsetRMSNorm, RMSNorm
from quire_models.layers.rotary import RotaryTable
from quire_models.layers.scope import Scope
from quire_models.rope_config import RopeConfig
from quire_ops import DecoderLayerWeights, DecodeRows, LoraTokens, RunDecode

__all__ = ["DecoderLM", "StreamLayer"]

Config = TypeVar("Config", bound=ModelConfig)


class StreamLayer(Protocol):
    """One layer."""

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> [T, hidden_size], the residual stream before and after; cos and sin [T, 1, D]."""


class DecoderLM(Network):
    """Embedding, layers, a norm, the LM head. Families override `embed`, `rope_of_layer` and `compute_logits`."""

    def __init__(
        self,
        config: Config,
        scope: Scope,
        make_layer: Callable[[Config, int, Scope], StreamLayer],
        make_norm: Callable[[Scope, int, float], Callable[[Tensor], Tensor]],
        *,
        body: str = "model",
        embedding: str = "embed_tokens",
        layers: str = "layers",
        norm: str = "norm",
        head: str = "lm_head",
        head_bias: bool = False,
        embedding_factor: float = 1.0,
        logits_factor: float = 1.0,
        logits_soft_cap: float | None = None,
    ) -> None:
        """Args:
        make_layer: (config, index of the layer, scope of the layer) -> the layer.
        make_norm: (scope, size, eps) -> the norm behind the layers.
        body: What the names of everything but the LM head begin with; the others are names in it.
        embedding_factor: Of what the embedding gives.
        logits_soft_cap: Logits become cap * tanh(logits / cap), after their factor.
        """
        super().__init__(config, scope)
        inner = scope
        for part in body.split("."):
            inner = inner / part
        self.body = inner
        self.embedding = Embedding(inner / embedding, config.vocab_size, config.embedding_width)
        self.layers = [make_layer(config, i, inner / layers / str(i)) for i in range(config.num_layers)]
        self.norm = make_norm(inner / norm, config.hidden_size, config.rms_norm_eps)
        tied_to = self.embedding if config.tie_word_embeddings else None
        self.lm_head = LMHead(scope / head, config.vocab_size, config.embedding_width, tied_to=tied_to, bias=head_bias)
        self.ignored_tensors = frozenset({f"{head}.weight"} if tied_to else ())
        ropes = [self.rope_of_layer(i) if config.rotary_dim else None for i in range(config.num_layers)]
        self._rope_of_layer = ropes
        self._tables = {
            rope: RotaryTable(rope, config.rotary_dim, dtype=scope.dtype, device=scope.device) for rope in ropes if rope
        }
        self._embedding_factor = embedding_factor
        self._logits_factor = logits_factor
        self._soft_cap = logits_soft_cap
        self._tanh = None if logits_soft_cap is None else activation(scope, "tanh")
        self._unrotated = torch.empty(0, dtype=scope.dtype, device=scope.device)

    @property
    def batch_invariant(self) -> bool:
        """Logits depend on nothing but the tokens before them: not on other requests, chunks, or what was cached.
        Promised where every op of the network promises it for itself."""
        return promised_by_ops(self._scope) and (self._stack is None or self._stack.batch_invariant)

    def finish_loading(self, after_each: Callable[[], None] = lambda: None) -> None:
        """See `Network.finish_loading`."""
        super().finish_loading(after_each)
        if isinstance(self.norm, RMSNorm | OffsetRMSNorm) and self._tables:
            layers = [self._as_data(i, self.norm.eps) for i in range(len(self.layers))]
            self._stack = FusedDecoder.bind(self._scope, self.config, layers, self.norm)

    def _as_data(self, index: int, eps: float) -> DecoderLayerWeights | None:
        """A layer for op `decoder_stack`, with its rotation among those of the network."""
        layer, rope = self.layers[index], self._rope_of_layer[index]
        data = layer.stack_weights(eps) if isinstance(layer, StackedBlock) else None
        if data is None or data.rotation is None or rope is None:
            return data
        return dataclasses.replace(data, rotation=list(self._tables).index(rope))

    def rope_of_layer(self, layer: int) -> RopeConfig:
        """The rotation of a layer."""
        return self.config.rope

    def embed(self, batch: ForwardBatch) -> Tensor:
        """[T, hidden_size]: what the first layer gets."""
        x = self.embedding(batch.input_ids, batch.lora)
        return x if self._embedding_factor == 1.0 else x * self._embedding_factor

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """See `Network.forward`."""
        self.use_adapters(batch.lora)
        length = max(batch.attention[0].kv_lens)
        rotations = {rope: table(batch.positions, length) for rope, table in self._tables.items()}
        x = self.embed(batch)
        if self._stack is not None and self._stack.reads(batch.kv_caches[0]):
            return self._stack(x, list(rotations.values()), batch, {})
        nothing = (self._unrotated, self._unrotated)
        for layer, rope in zip(self.layers, self._rope_of_layer, strict=True):
            cos, sin = nothing if rope is None else rotations[rope]
            x = layer(x, cos, sin, batch)
        return self.norm(x)

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor, lora: LoraTokens | None = None) -> Tensor:
        """See `Network.compute_logits`."""
        logits = self.lm_head(hidden, lora)
        if self._logits_factor != 1.0:
            logits *= self._logits_factor
        if self._tanh is None or self._soft_cap is None:
            return logits
        return self._tanh(logits / self._soft_cap) * self._soft_cap

    def bind_decode(self, rows: DecodeRows) -> RunDecode | None:
        """See `Network.bind_decode`."""
        is_plain = type(self).embed is DecoderLM.embed and type(self).compute_logits is DecoderLM.compute_logits
        if self._stack is None or not is_plain:
            return None
        return self._stack.bind_decode(
            rows,
            self.embedding,
            self.lm_head,
            [table.up_to for table in self._tables.values()],
            embedding_factor=self._embedding_factor,
            logits_factor=self._logits_factor,
            logits_soft_cap=self._soft_cap,
        )

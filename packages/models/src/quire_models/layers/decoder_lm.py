"""A decoder-only network: embedding, layers, the norm behind them, the LM head where it has one.

Shape legend: T tokens of the step, N hidden states whose logits are wanted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from quire_attention import ForwardBatch
from quire_interfaces import ConfigError
from quire_models.build import build_layer, within
from quire_models.config import ModelConfig
from quire_models.layers.activations import activation
from quire_models.layers.add_norm import AddNorm
from quire_models.layers.blocks import FusedLayer
from quire_models.layers.deepstack import DeepstackFeatures
from quire_models.layers.fused_decoder import FusedDecoder
from quire_models.layers.invariance import promised_by_ops
from quire_models.layers.linear import Linear, LMHead
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.moe import SharedExpert, SparseMoE
from quire_models.layers.network import Network
from quire_models.layers.norm import LayerNorm, OffsetRMSNorm, RMSNorm, make_norm
from quire_models.layers.rotary import RotaryTable
from quire_models.layers.scope import Scope
from quire_models.layers.token_embedding import TokenEmbedding
from quire_models.layers.whole_spans import with_whole_spans
from quire_models.rope_config import RopeConfig
from quire_models.spec import EmbeddingSpec, LayerSpec
from quire_ops import DecoderLayerWeights, DecodeRows, LoraTokens, RunDecode
from quire_ops.ops import op_named

__all__ = ["DecoderLM"]


class DecoderLM(Network):
    """The network that `config.network` describes."""

    make_embedding: Callable[[EmbeddingSpec, Scope], TokenEmbedding] = TokenEmbedding
    """Makes what stands before the layers, with the table of tokens."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope)
        spec, head = config.network, config.network.head
        body = within(scope, spec.body)
        self.embed = self.make_embedding(spec.embedding, body)
        self.embedding = self.embed.table
        self.layers, index = [], 0
        for layer in spec.layers:
            self.layers.append(build_layer(layer, index, scope / layer.name))
            index += len(layer.mixers)
        self.norm = (lambda x: x) if spec.final_norm is None else make_norm(spec.final_norm, body)
        self._add_norm = AddNorm(self.norm)
        self._lm_head: LMHead | None = None
        if spec.has_lm_head:
            tied_to = self.embedding if head.tied else None
            width = spec.embedding.size
            self._lm_head = LMHead(scope / head.name, spec.vocab_size, width, tied_to=tied_to, bias=head.bias)
            self.ignored_tensors = frozenset({f"{head.name}.weight"} if tied_to else ())
        self._project_out = None if head.project_out is None else Linear.of(body, head.project_out)
        self._tables, self._rotations = rotary_tables(spec.layers, scope)
        media = config.media
        self._sees_whole_spans = media is not None and media.is_bidirectional
        self._has_own_steps = media is not None and (media.is_bidirectional or len(media.deepstack_layers) > 0)
        self._logits_factor, self._soft_cap = head.factor, head.soft_cap
        self._tanh = None if head.soft_cap is None else activation(scope, "tanh")
        self._unrotated = torch.empty(0, dtype=scope.dtype, device=scope.device)

    @property
    def lm_head(self) -> LMHead:
        """The LM head.

        Raises:
            ConfigError: The network has none.
        """
        if self._lm_head is None:
            raise ConfigError(f"{self.config.architecture} has no LM head: it gives hidden states only", field="model")
        return self._lm_head

    def _token_table(self) -> Tensor:
        return self.embedding.part(None)

    @property
    def batch_invariant(self) -> bool:
        """Logits depend on nothing but the tokens before them: not on other requests, chunks, or what was cached.

        Promised where every op of the network promises it, or, in a plain network, the one call that runs its layers
        and the op behind it. Steps with media whose features or attention that call does not know go op by op: they
        round as the call does, but the ops of attention and towers promise nothing.
        """
        if self._stack is not None and self._has_own_steps:
            return False
        if self._stack is None or not self._is_plain or self._soft_cap is not None:
            return promised_by_ops(self._scope) and (self._stack is None or self._stack.batch_invariant)
        if self._lm_head is None:
            return self._stack.batch_invariant
        return self._stack.batch_invariant and self._scope.choose(op_named(self.lm_head.op)).batch_invariant

    @property
    def _is_plain(self) -> bool:
        """Nothing stands before the layers and behind their norm but embedding and LM head, with their factors."""
        return self.embed.is_plain and self._project_out is None

    def finish_loading(self, after_each: Callable[[], None] = lambda: None) -> None:
        """Give the loaded parameters to their layers, and bind the op that runs all layers in one call."""
        super().finish_loading(after_each)
        if isinstance(self.norm, RMSNorm | OffsetRMSNorm | LayerNorm):
            layers = [self._fused_layer(i) for i in range(len(self.layers))]
            norm = self.norm.fused_weights()
            self._stack = FusedDecoder.bind(self._scope, self.config, layers, norm)
            goes_apart = self._scope.tp_group is not None if self._stack is None else self._has_own_steps
            if goes_apart and FusedDecoder.keeps_gates_wide(self._scope, self.config, layers, norm):
                self._widen()

    def go_op_by_op(self) -> None:
        """Run layers one by one from now on, rounding as the one call does that ran them all."""
        if self._stack is not None:
            assert isinstance(self.norm, RMSNorm | OffsetRMSNorm | LayerNorm), "others bind no stack"
            layers = [self._fused_layer(i) for i in range(len(self.layers))]
            if FusedDecoder.keeps_gates_wide(self._scope, self.config, layers, self.norm.fused_weights()):
                self._widen()
        super().go_op_by_op()

    def _widen(self) -> None:
        """Have gated networks round as they do in one call, so that ranks that share them give the bits of one."""
        for part in (getattr(layer, "feed_forward", None) for layer in self.layers):
            shared = part.shared if isinstance(part, SparseMoE) else part
            network = shared.mlp if isinstance(shared, SharedExpert) else shared
            if isinstance(network, GatedMLP):
                network.is_wide = True

    def _fused_layer(self, index: int) -> DecoderLayerWeights | None:
        """A layer for op `decoder_stack`, with its rotation among those of the network."""
        layer, rotation = self.layers[index], self._rotations[index]
        weights = layer.fused_weights() if isinstance(layer, FusedLayer) else None
        if weights is None or rotation is None or getattr(weights.mixer, "rotation", None) is None:
            return weights
        mixer = dataclasses.replace(weights.mixer, rotation=rotation)  # type: ignore[type-var]  # dataclasses alone have one
        return dataclasses.replace(weights, mixer=mixer)

    def head_input(self, hidden: Tensor) -> Tensor:
        """Hidden states [N, hidden_size] -> input of the LM head, [N, width of the embedding]."""
        return hidden if self._project_out is None else self._project_out(hidden)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """[T] tokens -> hidden states [T, hidden_size] after the last norm; writes the step's keys and values."""
        return self._forward(batch, {})

    def forward_with_features(self, batch: ForwardBatch, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Hidden states as `forward` gives them, and the residual stream before some layers side by side,
        [T, len(layers) * hidden_size]. The number of layers stands for the stream behind the last one."""
        shape = (len(batch.input_ids), self.config.hidden_size)
        taps = {layer: torch.empty(shape, dtype=self.dtype, device=self.device) for layer in layers}
        hidden = self._forward(batch, taps)
        return hidden, torch.cat([taps[layer] for layer in layers], dim=-1)

    def _forward(self, batch: ForwardBatch, taps: dict[int, Tensor]) -> Tensor:
        """Hidden states [T, hidden_size]. `taps`: layer -> tensor [T, hidden_size] for the stream before it."""
        self.use_adapters(batch.lora)
        media = self.config.media
        if self._sees_whole_spans and media is not None:
            batch = with_whole_spans(batch, self.config.sliding_windows, media)
        length = max(batch.num_positions, *batch.attention[0].kv_lens)
        rotations = [table(batch.positions, length) for table in self._tables]
        x = self.embed(batch.input_ids, batch.positions, batch.lora, batch.media)
        features = DeepstackFeatures.of(batch.media, media.deepstack_layers if media else (), self.config.hidden_size)
        if self._stack is not None and self._stack.serves(batch) and not features.of_layer:
            return self._stack(x, rotations, batch, taps)
        unrotated, residual = (self._unrotated, self._unrotated), None
        for i, (layer, rotation) in enumerate(zip(self.layers, self._rotations, strict=True)):
            x = features.add(x, i)
            self._tap(taps, i, x, residual)
            cos, sin = unrotated if rotation is None else rotations[rotation]
            x, residual = layer(x, residual, cos, sin, batch)
        x = features.add(x, len(self.layers))
        self._tap(taps, len(self.layers), x, residual)
        hidden: Tensor = self._add_norm(x, residual)[0]
        return hidden

    @staticmethod
    def _tap(taps: dict[int, Tensor], layer: int, x: Tensor, residual: Tensor | None) -> None:
        """Copy the residual stream before a layer, where somebody wants it."""
        if layer in taps:
            taps[layer].copy_(x if residual is None else x + residual)

    def compute_logits(self, hidden: Tensor, lora: LoraTokens | None = None) -> Tensor:
        """Hidden states [N, hidden_size] -> logits [N, vocab_size] float32, with the adapters of `lora`."""
        logits = self.lm_head(self.head_input(hidden), lora)
        if self._logits_factor != 1.0:
            logits *= self._logits_factor
        if self._tanh is None or self._soft_cap is None:
            return logits
        return self._tanh(logits / self._soft_cap) * self._soft_cap

    @property
    def has_fused_argmax(self) -> bool:
        """The LM head finds the largest logit. What follows it has to keep the order of logits and make no two of them
        equal: a power of two does, in float32, but no other factor and no soft cap."""
        return self._soft_cap is None and math.frexp(self._logits_factor)[0] == 0.5

    def argmax(self, hidden: Tensor, lora: LoraTokens | None = None) -> tuple[Tensor, Tensor]:
        """Hidden states [N, hidden_size] -> token ids of the largest logits [N] int64, the lowest among equals, and
        these logits [N] float32 (NaN where one is). Other logits need not be written."""
        if not self.has_fused_argmax:
            return super().argmax(hidden, lora)
        token_ids, max_logits = self.lm_head.argmax(self.head_input(hidden), lora)
        return token_ids, max_logits if self._logits_factor == 1.0 else max_logits * self._logits_factor

    def bind_decode(self, rows: DecodeRows) -> RunDecode | None:
        """The network joined with the rows of a runner (op `decode_step`); None where no backend runs it in one
        call."""
        if self._stack is None or self._lm_head is None or not self._is_plain:
            return None
        return self._stack.bind_decode(
            rows,
            self.embedding,
            self._lm_head,
            [table.up_to for table in self._tables],
            embedding_factor=self.embed.factor,
            logits_factor=self._logits_factor,
            logits_soft_cap=self._soft_cap,
        )


def rotary_tables(layers: tuple[LayerSpec, ...], scope: Scope) -> tuple[list[RotaryTable], list[int | None]]:
    """The different rotations of some layers, and for each layer which one is its own; None for none."""
    ropes: dict[tuple[RopeConfig, int], int] = {}
    rotations: list[int | None] = []
    for layer in layers:
        rotated = next((mixer for mixer in layer.mixers if getattr(mixer, "rope", None) is not None), None)
        key = None if rotated is None else (rotated.rope, rotated.rotary_dim)  # type: ignore[attr-defined]  # those with rope
        rotations.append(None if key is None else ropes.setdefault(key, len(ropes)))
    return [RotaryTable(rope, size, dtype=scope.dtype, device=scope.device) for rope, size in ropes], rotations

"""An encoder that reads one text, and a decoder that writes another and looks at it.

Shape legend: T tokens of the step, which are the decoder's; N tokens of either stack.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from quire_attention import EncoderBatch, ForwardBatch
from quire_models.build import build_feed_forward, build_mixer, within
from quire_models.config import ModelConfig
from quire_models.encoder_spec import CrossLayerSpec, EncoderDecoderSpec
from quire_models.layers.blocks import layer_weights
from quire_models.layers.decoder_lm import rotary_tables
from quire_models.layers.encoder import CrossAttention, EncoderLayer
from quire_models.layers.fused_decoder import FusedDecoder
from quire_models.layers.linear import Embedding, LMHead
from quire_models.layers.network import Network
from quire_models.layers.norm import FusableNorm, make_norm
from quire_models.layers.scope import Scope
from quire_models.layers.token_embedding import TokenEmbedding
from quire_models.layers.vocab_parallel import VocabParallelEmbedding
from quire_ops import AttentionWeights, DecoderLayerWeights, LoraTokens

__all__ = ["CrossDecoderLayer", "EncoderDecoderLM"]


class CrossDecoderLayer:
    """x + attention(norm(x)), x + cross(norm(x)), then x + feed_forward(norm(x)); or norms behind the sums."""

    def __init__(self, spec: CrossLayerSpec, index: int, cross_index: int, scope: Scope) -> None:
        """Args:
        index: Number of the cache of its own attention in a batch.
        cross_index: The same of its cross attention.
        scope: Scope of the layer.
        """
        assert spec.feed_forward is not None
        self.attention = build_mixer(spec.mixers[0], index, scope)
        self.cross = CrossAttention(spec.cross, cross_index, scope / spec.cross.name)
        self.feed_forward = build_feed_forward(spec.feed_forward, scope)
        self._is_post_ln = spec.arrangement == "post_ln"
        first, last = spec.input_norm, spec.feed_forward_norm
        if self._is_post_ln:
            first, last = spec.attention_out_norm, spec.feed_forward_out_norm
        assert first is not None
        assert last is not None
        self._norms = tuple(make_norm(norm, scope) for norm in (first, spec.cross_norm, last))

    def fused_weights(self, rotation: int | None) -> tuple[DecoderLayerWeights, ...] | None:
        """The layer as two for op `decoder_stack`, its own attention and what is behind it, or None when that op cannot
        compute it.

        Args:
            rotation: Which one of the network's its own attention has; None for none.
        """
        attention_norm, cross_norm, feed_forward_norm = self._norms
        if self._is_post_ln:
            return None
        first = layer_weights(self.attention, None, input_norm=attention_norm)
        second = layer_weights(
            self.cross, self.feed_forward, input_norm=cross_norm, feed_forward_norm=feed_forward_norm
        )
        if first is None or second is None or not isinstance(first.mixer, AttentionWeights):
            return None
        return dataclasses.replace(first, mixer=dataclasses.replace(first.mixer, rotation=rotation)), second

    def __call__(self, x: Tensor, batch: ForwardBatch, rotation: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """x [T, hidden_size] -> [T, hidden_size]; `rotation`: cosines and sines of its own attention, None for none."""
        cos, sin = (x, x) if rotation is None else rotation
        attention_norm, cross_norm, feed_forward_norm = self._norms
        if self._is_post_ln:
            x = attention_norm(x + self.attention(x, cos, sin, batch))
            x = cross_norm(x + self.cross(x, batch))
            return feed_forward_norm(x + self.feed_forward(x))
        x = x + self.attention(attention_norm(x), cos, sin, batch)
        x = x + self.cross(cross_norm(x), batch)
        return x + self.feed_forward(feed_forward_norm(x))


class EncoderDecoderLM(Network):
    """The network that `config.network` describes."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope)
        spec = config.network
        assert isinstance(spec, EncoderDecoderSpec)
        encoder, decoder = within(scope, spec.encoder_body), within(scope, spec.body)
        make_table = Embedding if scope.tp_group is None else VocabParallelEmbedding
        self.tokens = tokens = make_table(scope / spec.shared, spec.vocab_size, spec.hidden_size)
        self.encoder_embedding = TokenEmbedding(spec.encoder_embedding, encoder, tokens)
        of_layers = self.encoder_scope(scope)
        self.encoder_layers = [EncoderLayer(layer, of_layers / layer.name) for layer in spec.encoder_layers]
        self.decoder_embedding = TokenEmbedding(spec.embedding, decoder, tokens)
        num_layers = len(spec.layers)
        self.decoder_layers = [
            CrossDecoderLayer(layer, index, num_layers + index, scope / layer.name)
            for index, layer in enumerate(spec.layers)
            if isinstance(layer, CrossLayerSpec)
        ]
        self._tables, self._rotations = rotary_tables(spec.layers, scope)
        self.encoder_norm = None if spec.encoder_norm is None else make_norm(spec.encoder_norm, encoder)
        self.decoder_norm = None if spec.final_norm is None else make_norm(spec.final_norm, decoder)
        head = spec.head
        self.lm_head = LMHead(
            scope / head.name,
            spec.vocab_size,
            spec.hidden_size,
            tied_to=tokens if head.tied else None,
            bias=head.bias,
            may_differ=head.may_differ,
        )
        self._hidden_factor = head.hidden_factor
        # A head that may differ is read where the checkpoint brings one.
        self.ignored_tensors = frozenset({f"{head.name}.weight"} if head.tied and not head.may_differ else ())

        self.is_observed: Callable[[], bool] = lambda: False
        """Whether somebody looks into the layers of the next step, which then run op by op."""

    def finish_loading(self, after_each: Callable[[], None] = lambda: None) -> None:
        """Give the loaded parameters to their layers, and bind the op that runs the decoder's in one call."""
        super().finish_loading(after_each)
        if self._scope.tp_group is None and isinstance(self.decoder_norm, FusableNorm):
            halves: list[DecoderLayerWeights | None] = []
            for layer, rotation in zip(self.decoder_layers, self._rotations, strict=True):
                halves += layer.fused_weights(rotation) or (None,)
            self._stack = FusedDecoder.bind(self._scope, self.config, halves, self.decoder_norm.fused_weights())

    def encoder_scope(self, scope: Scope) -> Scope:
        """What the encoder's layers get in the place of the network's scope. Called while the network is made."""
        return scope

    @property
    def host_lengths(self) -> tuple[str, ...]:
        """Parts that read lengths on the host: cross attention, beside those of any network."""
        return (*super().host_lengths, "cross attention")

    @torch.inference_mode()
    def encode(self, batch: ForwardBatch) -> None:
        """Have the encoder read `batch.encoder`, and keep keys and values of that for the decoder's cross attention."""
        inputs = batch.encoder
        assert inputs is not None
        self.use_adapters(inputs.lora)
        x = self.run_encoder(self.encoder_input(inputs), inputs.lens)
        for decoder_layer in self.decoder_layers:
            decoder_layer.cross.write(x, batch)

    def run_encoder(self, x: Tensor, lens: list[int]) -> Tensor:
        """All layers of the encoder and the norm behind them.

        Args:
            x: [E, hidden_size], what the first layer reads.
            lens: Tokens of each input.
        """
        return self.layer_by_layer(x, lens)

    def layer_by_layer(self, x: Tensor, lens: list[int]) -> Tensor:
        """The same, op by op."""
        for layer, position_bias in zip(self.encoder_layers, self.encoder_biases(), strict=True):
            x = layer(x, lens, None, position_bias)
        return x if self.encoder_norm is None else self.encoder_norm(x)

    def encoder_input(self, inputs: EncoderBatch) -> Tensor:
        """What the encoder's first layer reads, [E, hidden_size]."""
        return self.encoder_embedding(inputs.input_ids, inputs.positions, inputs.lora)

    def encoder_biases(self) -> list[Tensor | None]:
        """Biases of the encoder's attention scores by distance, for each layer; None for none."""
        return [None] * len(self.encoder_layers)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """[T] tokens -> the decoder's hidden states [T, hidden_size] after its last norm."""
        self.use_adapters(batch.lora)
        x = self.decoder_embedding(batch.input_ids, batch.positions, batch.lora)
        length = max(batch.num_positions, *batch.attention[0].kv_lens) if self._tables else 0
        rotations = [table(batch.positions, length) for table in self._tables]
        if self._stack is not None and self._stack.serves(batch) and not self.is_observed():
            return self._stack(x, rotations, batch, {})
        for layer, rotation in zip(self.decoder_layers, self._rotations, strict=True):
            x = layer(x, batch, None if rotation is None else rotations[rotation])
        return x if self.decoder_norm is None else self.decoder_norm(x)

    def head_input(self, hidden: Tensor) -> Tensor:
        """Hidden states [N, hidden_size] -> input of the LM head, of the same shape."""
        return hidden if self._hidden_factor == 1.0 else hidden * self._hidden_factor

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor, lora: LoraTokens | None = None) -> Tensor:
        """Hidden states [N, hidden_size] -> logits [N, vocab_size] float32, with the adapters of `lora`."""
        return self.lm_head(self.head_input(hidden), lora)

    @torch.inference_mode()
    def argmax(self, hidden: Tensor, lora: LoraTokens | None = None) -> tuple[Tensor, Tensor]:
        """Hidden states [N, hidden_size] -> token ids of the largest logits [N] int64, the lowest among equals, and
        these logits [N] float32. Other logits need not be written."""
        return self.lm_head.argmax(self.head_input(hidden), lora)

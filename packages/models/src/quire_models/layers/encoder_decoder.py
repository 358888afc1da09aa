"""An encoder that reads one text, and a decoder that writes another and looks at it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from quire_attention import EncoderBatch, ForwardBatch
from quire_models.encoder_config import EncoderDecoderConfig
from quire_models.layers.encoder import CrossAttention
from quire_models.layers.linear import LMHead
from quire_models.layers.network import Network
from quire_models.layers.scope import Scope
from quire_ops import LoraTokens

__all__ = ["CrossDecoderLayer", "EncoderDecoderLM", "EncoderLayer"]


class EncoderLayer(Protocol):
    """One layer of an encoder."""

    def __call__(self, x: Tensor, batch: EncoderBatch) -> Tensor:
        """x [E, hidden_size] -> [E, hidden_size]."""


class CrossDecoderLayer(Protocol):
    """One layer of a decoder that looks at what an encoder read."""

    cross: CrossAttention

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> [T, hidden_size]."""


class EncoderDecoderLM(Network):
    """Families make the parts and say how tokens are embedded (`embed`)."""

    encoder_layers: Sequence[EncoderLayer]
    encoder_norm: Callable[[Tensor], Tensor] | None
    """Behind the encoder's layers."""
    decoder_layers: Sequence[CrossDecoderLayer]
    decoder_norm: Callable[[Tensor], Tensor] | None
    """Behind the decoder's layers."""
    lm_head: LMHead

    def __init__(self, config: EncoderDecoderConfig, scope: Scope) -> None:
        super().__init__(config, scope)

    @property
    def host_lengths(self) -> tuple[str, ...]:
        """See `Network.host_lengths`."""
        return (*super().host_lengths, "cross attention")

    def embed(self, input_ids: Tensor, positions: Tensor, lora: LoraTokens | None, *, decoder: bool) -> Tensor:
        """[N] tokens at their positions [N], with the adapters of `lora` -> input of the first layer,
        [N, hidden_size]."""
        raise NotImplementedError

    @torch.inference_mode()
    def encode(self, batch: ForwardBatch) -> None:
        """See `Network.encode`."""
        inputs = batch.encoder
        assert inputs is not None
        self.use_adapters(inputs.lora)
        x = self.embed(inputs.input_ids, inputs.positions, inputs.lora, decoder=False)
        for layer in self.encoder_layers:
            x = layer(x, inputs)
        if self.encoder_norm is not None:
            x = self.encoder_norm(x)
        for decoder_layer in self.decoder_layers:
            decoder_layer.cross.write(x, batch)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """See `Network.forward`."""
        self.use_adapters(batch.lora)
        x = self.embed(batch.input_ids, batch.positions, batch.lora, decoder=True)
        for layer in self.decoder_layers:
            x = layer(x, batch)
        return x if self.decoder_norm is None else self.decoder_norm(x)

    def head_input(self, hidden: Tensor) -> Tensor:
        """Hidden states [N, hidden_size] -> input of the LM head, of the same shape."""
        return hidden

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor, lora: LoraTokens | None = None) -> Tensor:
        """Hidden states [N, hidden_size] -> logits [N, vocab_size] float32, with the adapters of `lora`."""
        return self.lm_head(self.head_input(hidden), lora)

    @torch.inference_mode()
    def argmax(self, hidden: Tensor, lora: LoraTokens | None = None) -> tuple[Tensor, Tensor]:
        """Hidden states [N, hidden_size] -> token ids of the largest logits [N] int64, the lowest among equals, and
        these logits [N] float32. Other logits need not be written."""
        return self.lm_head.argmax(self.head_input(hidden), lora)

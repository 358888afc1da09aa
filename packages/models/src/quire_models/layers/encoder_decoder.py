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

__all__ = ["DecoderLayer", "EncoderDecoderLM", "EncoderLayer"]


class EncoderLayer(Protocol):
    """One layer of an encoder."""

    def __call__(self, x: Tensor, batch: EncoderBatch) -> Tensor:
        """x [E, hidden_size] -> [E, hidden_size]."""


class DecoderLayer(Protocol):
    """One layer of a decoder."""

    cross: CrossAttention

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> [T, hidden_size]."""


class EncoderDecoderLM(Network):
    """Families make the parts and say how tokens are embedded (`embed`)."""

    encoder_layers: Sequence[EncoderLayer]
    encoder_norm: Callable[[Tensor], Tensor] | None
    """Behind the encoder's layers."""
    decoder_layers: Sequence[DecoderLayer]
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
        """[N] tokens at their positions [N], with the adapters of `lora` -> what the first layer gets,
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

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor, lora: LoraTokens | None = None) -> Tensor:
        """See `Network.compute_logits`."""
        return self.lm_head(hidden, lora)

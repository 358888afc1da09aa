"""A decoder-only network with recurrent layers."""

from __future__ import annotations

from quire_models.layers.decoder_lm import DecoderLM
from quire_models.recurrent_config import RecurrentConfig

__all__ = ["RecurrentLM"]


class RecurrentLM(DecoderLM):
    """See `DecoderLM`."""

    config: RecurrentConfig

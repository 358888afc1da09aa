"""Qwen3.5's text networks (Qwen team 2026): Qwen3-Next's layers without experts, and four projections for each."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from quire_models.delta_config import GatedDeltaConfig
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.norm import OffsetRMSNorm
from quire_models.layers.scope import Scope
from quire_models.qwen3_next.model import delta_layer

__all__ = ["Qwen3_5ForCausalLM"]


class Qwen3_5ForCausalLM(DecoderLM):  # noqa: N801 (the checkpoint's name)
    """The Qwen3.5 text network. Its multi-token prediction head is not used."""

    def __init__(self, config: GatedDeltaConfig, scope: Scope) -> None:
        super().__init__(config, scope, delta_layer, OffsetRMSNorm)

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """See `Network.checkpoint_tensors`."""
        return () if name.startswith("mtp.") else ((name, tensor),)

"""Phi-3 and Phi-4 (Abdin et al. 2024): Llama whose checkpoints keep projections of the same input in one matrix."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from quire_models.config import ModelConfig
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.fused import split_rows
from quire_models.layers.scope import Scope
from quire_models.llama.model import make_llama_layer

__all__ = ["Phi3ForCausalLM"]


class Phi3ForCausalLM(DecoderLM):
    """The Phi-3 network."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_llama_layer)

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Takes the fused matrices apart."""
        query, kv, inner = self.config.query_size, self.config.kv_size, self.config.intermediate_size
        qkv = {"q_proj": query, "k_proj": kv, "v_proj": kv}
        return split_rows(name, tensor, {"qkv_proj": qkv, "gate_up_proj": {"gate_proj": inner, "up_proj": inner}})

"""Qwen3-Next (Qwen team 2025): gated delta nets, gated attention in every fourth layer, experts."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.delta_config import GatedDeltaConfig
from quire_models.layers.gated_attention import GatedAttention
from quire_models.layers.gated_delta import GatedDeltaNet
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.moe import SparseMoE
from quire_models.layers.norm import OffsetRMSNorm
from quire_models.layers.recurrent_lm import RecurrentLM
from quire_models.layers.scope import Scope
from quire_models.qwen2_moe.model import make_moe
from quire_models.qwen3_next.config import Qwen3NextConfig

__all__ = ["DeltaLayer", "Qwen3NextForCausalLM"]


class DeltaLayer:
    """x + mixer(norm(x)), then x + mlp(norm(x)); the mixer is a gated delta net or gated attention."""

    def __init__(
        self, config: GatedDeltaConfig, layer: int, scope: Scope, *, sparse: bool = False, by_key_head: bool = False
    ) -> None:
        """Args:
        sparse: The feed-forward network has experts.
        by_key_head: See `GatedDeltaNet`.
        """
        hidden, eps = config.hidden_size, config.rms_norm_eps
        cache = config.cache_index(f"model.layers.{layer}")
        self.input_layernorm = OffsetRMSNorm(scope / "input_layernorm", hidden, eps)
        self.attention = GatedAttention(config, scope / "self_attn", cache) if config.attention_layers[layer] else None
        if self.attention is None:
            self.delta = GatedDeltaNet(scope / "linear_attn", config.delta, cache, by_key_head=by_key_head)
        self.post_attention_layernorm = OffsetRMSNorm(scope / "post_attention_layernorm", hidden, eps)
        self.mlp: SparseMoE | GatedMLP
        if sparse:
            assert isinstance(config, Qwen3NextConfig)
            self.mlp = make_moe(config, scope / "mlp")
        else:
            self.mlp = GatedMLP(scope / "mlp", hidden, config.intermediate_size, act=config.hidden_act)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        normed = self.input_layernorm(x)
        mixed = self.delta(normed, batch) if self.attention is None else self.attention(normed, cos, sin, batch)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen3NextForCausalLM(RecurrentLM):
    """The Qwen3-Next network. Its multi-token prediction head is not used."""

    config: Qwen3NextConfig

    def __init__(self, config: Qwen3NextConfig, scope: Scope) -> None:
        def make_layer(config: Qwen3NextConfig, layer: int, scope: Scope) -> DeltaLayer:
            return DeltaLayer(config, layer, scope, sparse=config.sparse_layers[layer], by_key_head=True)

        super().__init__(config, scope, make_layer, OffsetRMSNorm)

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """See `Network.checkpoint_tensors`."""
        return () if name.startswith("mtp.") else ((name, tensor),)

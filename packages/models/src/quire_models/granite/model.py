"""Granite 3 (IBM 2024): Llama with constant factors for embedding, scores, residuals and logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.granite.config import GraniteConfig
from quire_models.layers.attention import SelfAttention
from quire_models.layers.blocks import stacked
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.norm import RMSNorm
from quire_models.layers.scope import Scope
from quire_ops import DecoderLayerWeights

if TYPE_CHECKING:
    from quire_models.granitemoe.config import GraniteMoEConfig

__all__ = ["GraniteForCausalLM", "GraniteLayer"]


class GraniteLayer:
    """x + c * attention(norm(x)), then x + c * mlp(norm(x))."""

    def __init__(
        self,
        config: GraniteConfig | GraniteMoEConfig,
        layer: int,
        scope: Scope,
        mlp: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Args:
        mlp: None for a gated feed-forward network of the configuration's size.
        """
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(scope / "input_layernorm", hidden, eps)
        self.attention = SelfAttention(config, layer, scope / "self_attn", scale=config.attention_multiplier)
        self.mlp_norm = RMSNorm(scope / "post_attention_layernorm", hidden, eps)
        self.mlp = mlp or GatedMLP(
            scope / "mlp", hidden, config.intermediate_size, act=config.hidden_act, bias=config.mlp_bias
        )
        self.factor = config.residual_multiplier

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        x = x + self.attention(self.input_norm(x), cos, sin, batch) * self.factor
        return x + self.mlp(self.mlp_norm(x)) * self.factor

    def stack_weights(self, eps: float) -> DecoderLayerWeights | None:
        """See `StackedBlock`."""
        norms = {"input_norm": self.input_norm, "feed_forward_norm": self.mlp_norm}
        return stacked(eps, self.attention, self.mlp, norms, residual_factor=self.factor)


class GraniteForCausalLM(DecoderLM):
    """The Granite network."""

    config: GraniteConfig | GraniteMoEConfig

    def __init__(
        self,
        config: GraniteConfig | GraniteMoEConfig,
        scope: Scope,
        make_layer: Callable[[Any, int, Scope], GraniteLayer] = GraniteLayer,
    ) -> None:
        super().__init__(
            config,
            scope,
            make_layer,
            RMSNorm,
            embedding_factor=config.embedding_multiplier,
            logits_factor=1.0 / config.logits_scaling,
        )

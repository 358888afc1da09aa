"""GLM-4 of 2025 (0414): GLM with norms before and after each part."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from quire_models.config import ModelConfig
from quire_models.layers.attention import SelfAttention
from quire_models.layers.blocks import SequentialBlock
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.fused import split_rows
from quire_models.layers.mlp import GatedMLP
from quire_models.layers.norm import RMSNorm
from quire_models.layers.scope import Scope

__all__ = ["Glm4ForCausalLM"]


def make_layer(config: ModelConfig, layer: int, scope: Scope) -> SequentialBlock:
    """One layer."""
    hidden, eps = config.hidden_size, config.rms_norm_eps
    return SequentialBlock(
        input_norm=RMSNorm(scope / "input_layernorm", hidden, eps),
        mixer=SelfAttention(config, layer, scope / "self_attn", interleaved=True),
        attention_out_norm=RMSNorm(scope / "post_self_attn_layernorm", hidden, eps),
        feed_forward_norm=RMSNorm(scope / "post_attention_layernorm", hidden, eps),
        feed_forward=GatedMLP(scope / "mlp", hidden, config.intermediate_size, act=config.hidden_act),
        feed_forward_out_norm=RMSNorm(scope / "post_mlp_layernorm", hidden, eps),
    )


class Glm4ForCausalLM(DecoderLM):
    """The GLM-4 network."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_layer)

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Takes gate and up apart."""
        inner = self.config.intermediate_size
        return split_rows(name, tensor, {"gate_up_proj": {"gate_proj": inner, "up_proj": inner}})

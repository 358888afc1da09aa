"""GPT-J (Wang & Komatsuzaki 2021): parts side by side behind one norm, neighbours rotated in part of each head."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from quire_models.config import ModelConfig
from quire_models.layers.attention import SelfAttention
from quire_models.layers.blocks import ParallelBlock
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.mlp import MLP
from quire_models.layers.norm import LayerNorm
from quire_models.layers.scope import Scope

__all__ = ["GPTJForCausalLM"]


def make_layer(config: ModelConfig, layer: int, scope: Scope) -> ParallelBlock:
    """One layer."""
    hidden = config.hidden_size
    return ParallelBlock(
        input_norm=LayerNorm(scope / "ln_1", hidden, config.rms_norm_eps),
        mixer=SelfAttention(config, layer, scope / "attn", interleaved=True, out="out_proj"),
        feed_forward=MLP(
            scope / "mlp", hidden, config.intermediate_size, act=config.hidden_act, names=("fc_in", "fc_out")
        ),
    )


class GPTJForCausalLM(DecoderLM):
    """The GPT-J network."""

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(
            config,
            scope,
            make_layer,
            LayerNorm,
            body="transformer",
            embedding="wte",
            layers="h",
            norm="ln_f",
            head_bias=True,
        )

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """The first checkpoints hold the causal mask."""
        return () if name.endswith((".attn.bias", ".attn.masked_bias")) else ((name, tensor),)

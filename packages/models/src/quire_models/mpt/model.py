"""MPT (MosaicML 2023): pre-norm without biases, ALiBi slopes instead of positions."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from quire_models.layers.alibi import mpt_slopes
from quire_models.layers.attention import SelfAttention
from quire_models.layers.blocks import SequentialBlock
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.fused import split_rows
from quire_models.layers.mlp import MLP
from quire_models.layers.norm import LayerNorm
from quire_models.layers.scope import Scope
from quire_models.mpt.config import MptConfig

__all__ = ["MptForCausalLM"]


def make_norm(scope: Scope, size: int, eps: float) -> LayerNorm:
    """A layer norm with a weight only."""
    return LayerNorm(scope, size, eps, bias=False)


def make_layer(config: MptConfig, layer: int, scope: Scope) -> SequentialBlock:
    """One layer."""
    hidden, eps = config.hidden_size, config.rms_norm_eps
    attention = SelfAttention(
        config,
        layer,
        scope / "attn",
        scale=config.attention_scale,
        rotated=False,
        alibi_slopes=mpt_slopes(config.num_heads, config.alibi_bias_max).to(scope.device),
        clip=config.clip_qkv,
        out="out_proj",
    )
    names = ("up_proj", "down_proj")
    return SequentialBlock(
        input_norm=make_norm(scope / "norm_1", hidden, eps),
        mixer=attention,
        feed_forward_norm=make_norm(scope / "norm_2", hidden, eps),
        feed_forward=MLP(
            scope / "ffn", hidden, config.intermediate_size, act=config.hidden_act, bias=False, names=names
        ),
    )


class MptForCausalLM(DecoderLM):
    """The MPT network."""

    def __init__(self, config: MptConfig, scope: Scope) -> None:
        super().__init__(
            config,
            scope,
            make_layer,
            make_norm,
            body="transformer",
            embedding="wte",
            layers="blocks",
            norm="norm_f",
        )

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Takes queries, keys and values apart."""
        size = self.config.hidden_size
        return split_rows(name, tensor, {"Wqkv": {"q_proj": size, "k_proj": size, "v_proj": size}})

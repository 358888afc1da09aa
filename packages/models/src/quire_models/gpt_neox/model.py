"""GPT-NeoX and Pythia (Black et al. 2022): two layer norms, parts side by side, partial rotation."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from quire_models.gpt_neox.config import GPTNeoXConfig
from quire_models.layers.attention import SelfAttention
from quire_models.layers.blocks import ParallelBlock, SequentialBlock
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.fused import split_heads
from quire_models.layers.mlp import MLP
from quire_models.layers.norm import LayerNorm
from quire_models.layers.scope import Scope

__all__ = ["GPTNeoXForCausalLM"]


def make_layer(config: GPTNeoXConfig, layer: int, scope: Scope) -> ParallelBlock | SequentialBlock:
    """One layer."""
    hidden, eps = config.hidden_size, config.rms_norm_eps
    names = ("dense_h_to_4h", "dense_4h_to_h")
    block = ParallelBlock if config.use_parallel_residual else SequentialBlock
    return block(
        input_norm=LayerNorm(scope / "input_layernorm", hidden, eps),
        mixer=SelfAttention(config, layer, scope / "attention", out="dense"),
        feed_forward_norm=LayerNorm(scope / "post_attention_layernorm", hidden, eps),
        feed_forward=MLP(scope / "mlp", hidden, config.intermediate_size, act=config.hidden_act, names=names),
    )


class GPTNeoXForCausalLM(DecoderLM):
    """The GPT-NeoX network."""

    def __init__(self, config: GPTNeoXConfig, scope: Scope) -> None:
        super().__init__(
            config,
            scope,
            make_layer,
            LayerNorm,
            body="gpt_neox",
            embedding="embed_in",
            norm="final_layer_norm",
            head="embed_out",
        )

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Takes heads apart; the LM head has had two names, and the first checkpoints hold the causal mask."""
        if name.endswith((".attention.bias", ".attention.masked_bias")):
            return ()
        name = name.replace("lm_head.", "embed_out.")
        config = self.config
        return split_heads(name, tensor, "query_key_value", head_dim=config.head_dim, num_kv_heads=config.num_kv_heads)

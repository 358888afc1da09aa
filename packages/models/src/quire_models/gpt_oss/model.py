"""gpt-oss (OpenAI 2025): attention with sinks, windows in every other layer, experts with a clipped gate.

Shape legend: E experts, M width within an expert, I width of the network.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from quire_models.gpt_oss.config import GptOssConfig
from quire_models.layers.attention import SelfAttention
from quire_models.layers.blocks import SequentialBlock, pre_norm_block
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.expert_choice import ExpertChoice
from quire_models.layers.moe import FusedExperts, SparseMoE
from quire_models.layers.routing import Router
from quire_models.layers.scope import Scope
from quire_ops import RoutingRule

__all__ = ["GptOssForCausalLM"]


def make_moe(config: GptOssConfig, scope: Scope) -> SparseMoE:
    """The experts of the largest logits; their weights are the softmax over these."""
    rule = RoutingRule(top_k=config.num_experts_per_tok, scoring="softmax_of_chosen")
    select = ExpertChoice(scope, config.num_experts, rule)
    router = Router(scope / "router", config.hidden_size, config.num_experts, select, bias=True)
    experts = FusedExperts(
        scope / "experts",
        config.num_experts,
        config.hidden_size,
        config.moe_intermediate_size,
        act="swigluoai",
        limit=config.swiglu_limit,
        bias=True,
    )
    _accept_transposed(scope / "experts", config)
    if scope.quantization is not None:
        _accept_mxfp4(scope / "experts", config)
    return SparseMoE(router, experts)


def _accept_transposed(scope: Scope, config: GptOssConfig) -> None:
    """Files have [E, I, 2 M] and [E, M, I], inputs first, and gate and up by turns."""
    num, size, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size

    def split_gate_up(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        kind = "weight" if tensor.ndim == 3 else "bias"
        for expert, stored in enumerate(tensor):
            outputs_first = stored.movedim(0, -1)  # a vector stays what it is
            yield f"{scope.prefix}{expert}.gate_proj.{kind}", outputs_first[0::2].contiguous()
            yield f"{scope.prefix}{expert}.up_proj.{kind}", outputs_first[1::2].contiguous()

    def split_down(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        kind = "weight" if tensor.ndim == 3 else "bias"
        for expert, stored in enumerate(tensor):
            yield f"{scope.prefix}{expert}.down_proj.{kind}", stored.movedim(0, -1).contiguous()

    scope.packed("gate_up_proj", (num, size, 2 * inner), split_gate_up)
    scope.packed("gate_up_proj_bias", (num, 2 * inner), split_gate_up)
    scope.packed("down_proj", (num, inner, size), split_down)
    scope.packed("down_proj_bias", (num, size), split_down)


def _accept_mxfp4(scope: Scope, config: GptOssConfig) -> None:
    """Or [E, 2 M, I / 32, 16] and [E, I, M / 32, 16] in MXFP4, outputs first, with their scales."""
    num, size, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size

    def split_gate_up(tensor: Tensor, kind: str) -> Iterator[tuple[str, Tensor]]:
        for expert, stored in enumerate(tensor):
            yield f"{scope.prefix}{expert}.gate_proj.{kind}", stored[0::2].flatten(1)
            yield f"{scope.prefix}{expert}.up_proj.{kind}", stored[1::2].flatten(1)

    def split_down(tensor: Tensor, kind: str) -> Iterator[tuple[str, Tensor]]:
        for expert, stored in enumerate(tensor):
            yield f"{scope.prefix}{expert}.down_proj.{kind}", stored.flatten(1)

    for name, outputs, inputs, split in (
        ("gate_up_proj", 2 * inner, size, split_gate_up),
        ("down_proj", size, inner, split_down),
    ):
        scope.packed(f"{name}_blocks", (num, outputs, inputs // 32, 16), partial(split, kind="weight"))
        scope.packed(f"{name}_scales", (num, outputs, inputs // 32), partial(split, kind="weight_scale"))


def make_gpt_oss_layer(config: GptOssConfig, layer: int, scope: Scope) -> SequentialBlock:
    """One decoder layer."""
    attention = SelfAttention(config, layer, scope / "self_attn", sinks=True)
    return pre_norm_block(config, scope, attention, make_moe(config, scope / "mlp"))


class GptOssForCausalLM(DecoderLM):
    """The gpt-oss network."""

    def __init__(self, config: GptOssConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_gpt_oss_layer)

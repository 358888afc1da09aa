"""gpt-oss (OpenAI 2025): attention with sinks, windows in every other layer, experts with a clipped gate.

Shape legend: T tokens of the step, Hq query heads, Hkv key-value heads, D head dimension, E experts, M width within an
expert, I width of the network.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.gpt_oss.config import GptOssConfig
from quire_models.layers.causal_lm import CausalLM
from quire_models.layers.decoder import PreNormDecoderLayer
from quire_models.layers.expert_choice import ExpertChoice
from quire_models.layers.linear import Linear, stack_weights
from quire_models.layers.merged_linear import MergedLinear
from quire_models.layers.moe import FusedExperts, SparseMoE
from quire_models.layers.rope_and_cache import RopeAndCache
from quire_models.layers.rotary import Rotary
from quire_models.layers.routing import Router
from quire_models.layers.scope import Scope
from quire_ops import QuantizedTokens, RoutingRule

__all__ = ["GptOssForCausalLM"]


class GptOssAttention:
    """Causal self-attention; each head has a learned score that takes attention and gives nothing."""

    def __init__(self, config: GptOssConfig, layer: int, scope: Scope) -> None:
        hidden, query, kv = config.hidden_size, config.query_size, config.kv_size
        self.q_proj = Linear(scope / "q_proj", hidden, query, bias=config.qkv_bias)
        self.k_proj = Linear(scope / "k_proj", hidden, kv, bias=config.qkv_bias)
        self.v_proj = Linear(scope / "v_proj", hidden, kv, bias=config.qkv_bias)
        self._qkv = MergedLinear(scope, self.q_proj, self.k_proj, self.v_proj)
        self.o_proj = Linear(scope / "o_proj", query, hidden, bias=config.attention_out_bias)
        self._sinks = scope.parameter("sinks", config.num_heads)
        self.sinks: Tensor
        self.head_dim = config.head_dim
        self.sliding_window = config.sliding_windows[layer]
        self.attend = scope.attention(layer, scale=config.head_dim**-0.5, sliding_window=self.sliding_window)
        self.write = RopeAndCache(self.attend, Rotary(scope, config.head_dim, head_dim=config.head_dim))
        scope.when_loaded(self._finish)

    def _finish(self) -> None:
        self.sinks = self._sinks.take()

    @property
    def consumers(self) -> Sequence[Linear]:
        """See `SelfAttention`."""
        return self.q_proj, self.k_proj, self.v_proj

    def __call__(self, x: Tensor | QuantizedTokens, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> [T, hidden_size]."""
        query, key, value = (each.unflatten(1, (-1, self.head_dim)) for each in self._qkv(x))  # [T, Hq or Hkv, D]
        query = self.write(query, key, value, cos, sin, batch)
        return self.o_proj(self.attend.attend(query, batch, self.sinks).flatten(1))

    def stack_weights(self) -> dict[str, Any] | None:
        """See `SelfAttention`."""
        weights = stack_weights(q=self.q_proj, k=self.k_proj, v=self.v_proj, o=self.o_proj)
        if weights is None:
            return None
        return {
            **weights,
            "scale": self.head_dim**-0.5,
            "sliding_window": self.sliding_window,
            "sinks": self.sinks,
        }


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


def make_gpt_oss_layer(config: GptOssConfig, layer: int, scope: Scope) -> PreNormDecoderLayer:
    """One decoder layer."""
    attention = GptOssAttention(config, layer, scope / "self_attn")
    return PreNormDecoderLayer(config, scope, attention, first=layer == 0, mlp=make_moe(config, scope / "mlp"))


class GptOssForCausalLM(CausalLM):
    """The gpt-oss network."""

    def __init__(self, config: GptOssConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_gpt_oss_layer)

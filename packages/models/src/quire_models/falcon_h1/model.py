"""Falcon H1 (TII 2025, arXiv:2507.22448): Mamba-2 and attention side by side in every layer."""

from __future__ import annotations

import torch
from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.falcon_h1.config import FalconH1Config
from quire_models.layers.attention import HeadNorms, SelfAttention
from quire_models.layers.blocks import SequentialBlock
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.linear import Linear
from quire_models.layers.mamba2 import Mamba2Mixer
from quire_models.layers.merged_linear import MergedLinear
from quire_models.layers.norm import RMSNorm
from quire_models.layers.scope import Scope
from quire_ops import ops

__all__ = ["FalconH1ForCausalLM"]


class FalconH1MLP:
    """x [T, hidden_size] -> the same: c * down(silu(g * gate(x)) * up(x))."""

    def __init__(self, config: FalconH1Config, scope: Scope) -> None:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(scope / "gate_proj", hidden, inner, bias=bias)
        self.up_proj = Linear(scope / "up_proj", hidden, inner, bias=bias)
        self._gate_and_up = MergedLinear(scope, self.gate_proj, self.up_proj)
        self.down_proj = Linear(scope / "down_proj", inner, hidden, bias=bias)
        self._gate = scope.op(ops.silu_and_mul)
        self._gate_factor, self._factor = config.mlp_multipliers

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self._gate_and_up(x)
        return self.down_proj(self._gate(gate * self._gate_factor, up)) * self._factor


class SideBySide:
    """x [T, hidden_size] -> the same: mamba(x) + attention(x), both with factors of what they take and give."""

    def __init__(self, config: FalconH1Config, layer: int, scope: Scope) -> None:
        at = f"model.layers.{layer}"
        self.config = config
        self.mamba = Mamba2Mixer(
            scope / "mamba",
            config.mixer,
            config.cache_index(f"{at}.mamba"),
            factors=_projection_factors(config).to(dtype=scope.dtype, device=scope.device),
        )
        keys = HeadNorms(lambda query: query, lambda key: key * config.key_multiplier)
        self.attention = SelfAttention(config, config.cache_index(f"{at}.self_attn"), scope / "self_attn", norms=keys)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        config = self.config
        mixed = self.mamba(x * config.ssm_in_multiplier, cos, sin, batch) * config.ssm_out_multiplier
        attended = self.attention(x * config.attention_in_multiplier, cos, sin, batch)
        return mixed + attended * config.attention_out_multiplier


def make_layer(config: FalconH1Config, layer: int, scope: Scope) -> SequentialBlock:
    """One layer."""
    hidden, eps = config.hidden_size, config.rms_norm_eps
    return SequentialBlock(
        input_norm=RMSNorm(scope / "input_layernorm", hidden, eps),
        mixer=SideBySide(config, layer, scope),
        feed_forward_norm=RMSNorm(scope / "pre_ff_layernorm", hidden, eps),
        feed_forward=FalconH1MLP(config, scope / "feed_forward"),
    )


def _projection_factors(config: FalconH1Config) -> Tensor:
    """[outputs of the mixer's projection]"""
    shape = config.mixer
    group = shape.num_groups * shape.state_size
    sizes = torch.tensor([shape.inner_size, shape.inner_size, group, group, shape.num_heads])
    return torch.tensor(config.ssm_multipliers).repeat_interleave(sizes)


class FalconH1ForCausalLM(DecoderLM):
    """The Falcon H1 network."""

    config: FalconH1Config

    def __init__(self, config: FalconH1Config, scope: Scope) -> None:
        super().__init__(
            config,
            scope,
            make_layer,
            RMSNorm,
            norm="final_layernorm",
            embedding_factor=config.embedding_multiplier,
            logits_factor=config.lm_head_multiplier,
        )

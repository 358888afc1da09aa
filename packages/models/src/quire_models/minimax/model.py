"""MiniMax-Text-01 (MiniMax 2025, arXiv:2501.08313): lightning attention in most layers, softmax attention in some,
experts in all. Layers add to what their norm gave, not to what it took.

Shape legend: T tokens of the step, H heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.layers.activations import activation
from quire_models.layers.add_norm import AddNorm
from quire_models.layers.attention import SelfAttention
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.linear import Linear
from quire_models.layers.norm import RMSNorm
from quire_models.layers.scope import Scope
from quire_models.minimax.config import MiniMaxConfig
from quire_models.mixtral.model import make_moe
from quire_ops import ops

__all__ = ["LightningAttention", "MiniMaxForCausalLM"]

NORM_EPS = 1e-6

DERIVED = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
"""What files keep of each lightning attention although it follows from the number of the layer."""


class LightningAttention:
    """x [T, hidden_size] -> [T, hidden_size]: linear attention that forgets (Qin et al. 2024, arXiv:2401.04658).

    Each head keeps S [D, D]: S_t = exp(-slope) S_{t-1} + v_t k_t^T, and gives S_t q_t. That is a state space with one
    step size for all tokens, so op `mamba2_scan` computes it: values go in, keys write, queries read.
    """

    def __init__(self, config: MiniMaxConfig, layer: int, scope: Scope) -> None:
        shape = config.mixer
        hidden, inner, heads = shape.hidden_size, shape.inner_size, shape.num_heads
        self._layer, self._heads = layer, heads
        self.qkv_proj = Linear(scope / "qkv_proj", hidden, 3 * inner)
        self.output_gate = Linear(scope / "output_gate", hidden, inner)
        self.norm = RMSNorm(scope / "norm", inner, NORM_EPS)
        self.out_proj = Linear(scope / "out_proj", inner, hidden)
        self._act = activation(scope, config.hidden_act)
        self._gate = scope.op(ops.sigmoid_and_mul)
        self._scan = scope.op(ops.mamba2_scan)
        self._decay = -head_slopes(heads, layer, config.num_layers).to(scope.device)
        self._zeros = torch.zeros(heads, device=scope.device)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        (state,), layout = batch.states_of_layer(self._layer)
        query, key, value = self._act(self.qkv_proj(x)).unflatten(-1, (self._heads, -1)).chunk(3, dim=-1)  # [T, H, D]
        steps = torch.zeros(query.shape[:2], dtype=x.dtype, device=x.device)  # whatever they are, the limits make it 1
        out = self._scan(
            value, steps, self._decay, key, query, self._zeros, self._zeros, state, layout, dt_limit=(1.0, 1.0)
        )
        return self.out_proj(self._gate(self.output_gate(x), self.norm(out.flatten(1))))


def head_slopes(heads: int, layer: int, num_layers: int) -> Tensor:
    """[H] float32: how fast each head forgets, those of late layers more slowly."""
    slopes = torch.pow(torch.tensor(2.0 ** (-8 / heads)), torch.arange(1, heads + 1))
    return slopes * (1 - layer / (num_layers - 1 + 1e-5) + 1e-5)


class MiniMaxLayer:
    """y = norm(x), z = norm(a * y + b * attention(y)), c * z + d * experts(z)."""

    def __init__(self, config: MiniMaxConfig, layer: int, scope: Scope) -> None:
        hidden, eps, inner = config.hidden_size, config.rms_norm_eps, scope / "self_attn"
        self.attention: SelfAttention | LightningAttention
        if config.attention_layers[layer]:
            self.attention = SelfAttention(config, layer, inner)
            self.kept, self.added = config.full_attn_alpha_factor, config.full_attn_beta_factor
        else:
            self.attention = LightningAttention(config, layer, inner)
            self.kept, self.added = config.linear_attn_alpha_factor, config.linear_attn_beta_factor
        self.mlp_kept, self.mlp_added = config.mlp_alpha_factor, config.mlp_beta_factor
        self.input_norm = AddNorm(RMSNorm(scope / "input_layernorm", hidden, eps))
        self.mlp_norm = AddNorm(RMSNorm(scope / "post_attention_layernorm", hidden, eps))
        self.mlp = make_moe(config, scope / "block_sparse_moe", scope / "mlp")

    def __call__(
        self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor | None]:
        x, _ = self.input_norm(x, residual)
        x, _ = self.mlp_norm(self.attention(x, cos, sin, batch) * self.added, x * self.kept)
        return self.mlp(x) * self.mlp_added, x * self.mlp_kept


class MiniMaxForCausalLM(DecoderLM):
    """The MiniMax-Text-01 network."""

    config: MiniMaxConfig

    def __init__(self, config: MiniMaxConfig, scope: Scope) -> None:
        super().__init__(config, scope, MiniMaxLayer)

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Leaves out what is derived."""
        return () if name.rpartition(".")[2] in DERIVED else ((name, tensor),)

"""Modules that only Zamba2 has.

Shape legend: T tokens of the step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.build import build_mixer
from quire_models.config import ModelConfig
from quire_models.families.zamba2 import BlockUseSpec, Zamba2LayerSpec
from quire_models.layers.activations import activation
from quire_models.layers.add_norm import AddNorm
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.linear import Linear
from quire_models.layers.merged_linear import MergedLinear
from quire_models.layers.norm import RMSNorm, make_norm
from quire_models.layers.rotary import Rotary
from quire_models.layers.scope import Scope

__all__ = ["Zamba2ForCausalLM"]


class LowRank:
    """x [T, inputs] -> [T, outputs] through `rank` numbers."""

    def __init__(self, scope: Scope, inputs: int, rank: int, outputs: int) -> None:
        self.down = Linear(scope / "0", inputs, rank)
        self.up = Linear(scope / "1", rank, outputs)

    def __call__(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


class SharedBlock:
    """down(act(gate) * up) of norm(attention(norm([x, embedding]))); the weights of all layers that use it."""

    def __init__(self, spec: BlockUseSpec, scope: Scope) -> None:
        attention, inner = spec.attention, spec.intermediate_size
        hidden, wide = attention.hidden_size, attention.in_features
        self.scope = scope
        self.input_norm = RMSNorm(scope / "input_layernorm", wide, spec.eps)
        at = scope / "self_attn"
        *projections, self.o_proj = (Linear.of(at, each) for each in attention.projections())
        self.projections = MergedLinear(at, *projections)
        self.rotary = Rotary(at, attention.rotary_dim) if attention.rope is not None else None
        self.mlp_norm = RMSNorm(scope / "pre_ff_layernorm", hidden, spec.eps)
        mlp = scope / "feed_forward"
        self.gate_up_proj = Linear(mlp / "gate_up_proj", hidden, 2 * inner, bias=spec.mlp_bias)
        self.down_proj = Linear(mlp / "down_proj", inner, hidden, bias=spec.mlp_bias)
        self.act = activation(scope, spec.act)


class BlockUse:
    """(x, embedding) [T, hidden_size] each -> [T, hidden_size]: a shared block with what this use adds to it."""

    def __init__(self, spec: BlockUseSpec, block: SharedBlock, index: int, scope: Scope) -> None:
        """Args:
        index: Number of the cache of its attention in a batch.
        scope: Scope of the layer that uses the block.
        """
        hidden, wide, rank = spec.attention.hidden_size, spec.attention.in_features, spec.rank
        self.block, self.head_dim = block, spec.attention.head_dim
        attention, mlp, number = block.scope / "self_attn", block.scope / "feed_forward", str(spec.number)
        self.added: list[LowRank | None] = [None] * 3
        if spec.attention_adapters:
            lists = [attention / f"linear_{name}_adapter_list" / number for name in "qkv"]
            self.added = [LowRank(each, wide, rank, wide) for each in lists]
        added = mlp / "gate_up_proj_adapter_list" / number
        self.gate_up_added = LowRank(added, hidden, rank, 2 * spec.intermediate_size)
        self.attend = (scope / spec.attention.name).attention(index, scale=spec.attention.scale)
        self.linear = Linear(scope / "linear", hidden, hidden)

    def __call__(self, x: Tensor, embedded: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> Tensor:
        block = self.block
        normed = block.input_norm(torch.cat((x, embedded), dim=-1))
        query, key, value = (
            (projected if added is None else projected + added(normed)).unflatten(-1, (-1, self.head_dim))
            for projected, added in zip(block.projections(normed), self.added, strict=True)
        )
        if block.rotary is not None:
            query, key = block.rotary(query, cos, sin), block.rotary(key, cos, sin)
        normed = block.mlp_norm(block.o_proj(self.attend(query, key, value, batch).flatten(1)))
        gate, up = (block.gate_up_proj(normed) + self.gate_up_added(normed)).chunk(2, dim=-1)
        return self.linear(block.down_proj(block.act(gate) * up))


class Zamba2Layer:
    """x + mamba(norm(x)), or x + mamba(norm(x + block(x, embedding)))."""

    def __init__(self, spec: Zamba2LayerSpec, index: int, scope: Scope) -> None:
        """Args:
        index: Number of its first cache in a batch, which has the states of Mamba-2.
        """
        assert spec.input_norm is not None
        self.norm = AddNorm(make_norm(spec.input_norm, scope))
        self.mamba = build_mixer(spec.mixers[0], index, scope)
        self.use: BlockUse | None = None

    def __call__(
        self, x: Tensor, residual: Tensor | None, embedded: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        if self.use is None:
            normed, total = self.norm(x, residual)
        else:
            total = x if residual is None else x + residual
            normed, _ = self.norm(self.use(total, embedded, cos, sin, batch), total.clone())
        return self.mamba(normed, cos, sin, batch), total


class Zamba2ForCausalLM(DecoderLM):
    """The Zamba2 network, whose layers see the embedding, too."""

    layers: list[Zamba2Layer]  # type: ignore[assignment]

    def __init__(self, config: ModelConfig, scope: Scope) -> None:
        super().__init__(config, scope)
        blocks: dict[str, SharedBlock] = {}
        index = 0
        for spec, layer in zip(config.network.layers, self.layers, strict=True):
            assert isinstance(spec, Zamba2LayerSpec)
            if spec.use is not None:
                name = spec.use.block
                blocks[name] = blocks.get(name) or SharedBlock(spec.use, scope / name)
                layer.use = BlockUse(spec.use, blocks[name], index + 1, scope / spec.name)
            index += len(spec.mixers)

    def _forward(self, batch: ForwardBatch, taps: dict[int, Tensor]) -> Tensor:
        """As `DecoderLM._forward`; layers take the embedding, too."""
        self.use_adapters(batch.lora)
        cos = sin = self._unrotated
        if self._tables:
            cos, sin = self._tables[0](batch.positions, max(batch.attention[0].kv_lens))
        embedded, residual = self.embed(batch.input_ids, batch.positions, batch.lora), None
        x = embedded.clone()  # additions may be written over it
        for i, layer in enumerate(self.layers):
            self._tap(taps, i, x, residual)
            x, residual = layer(x, residual, embedded, cos, sin, batch)
        self._tap(taps, len(self.layers), x, residual)
        hidden: Tensor = self._add_norm(x, residual)[0]
        return hidden

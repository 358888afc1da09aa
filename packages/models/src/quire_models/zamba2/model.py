"""Zamba2 (Zyphra 2024, arXiv:2411.15242): Mamba-2 in every layer, and a few attention blocks that layers share.

A shared block sees the residual stream beside the embedding, and what it makes of them is added to what the layer's
mixer takes, not to the stream. Each use of a block has low-rank additions of its own to the block's projections.

Shape legend: T tokens of the step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from quire_attention import ForwardBatch
from quire_models.layers.activations import activation
from quire_models.layers.add_norm import AddNorm
from quire_models.layers.decoder_lm import DecoderLM
from quire_models.layers.linear import Linear
from quire_models.layers.mamba2 import Mamba2Mixer
from quire_models.layers.merged_linear import MergedLinear
from quire_models.layers.norm import RMSNorm
from quire_models.layers.rotary import Rotary
from quire_models.layers.scope import Scope
from quire_models.zamba2.config import Zamba2Config

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

    def __init__(self, config: Zamba2Config, scope: Scope) -> None:
        hidden, inner, wide, eps = config.hidden_size, config.intermediate_size, config.block_width, config.rms_norm_eps
        self.scope = scope
        self.input_norm = RMSNorm(scope / "input_layernorm", wide, eps)
        attention = scope / "self_attn"
        sizes = {"q": config.query_size, "k": config.kv_size, "v": config.kv_size}
        projections = [Linear(attention / f"{name}_proj", wide, size) for name, size in sizes.items()]
        self.projections = MergedLinear(attention, *projections)
        self.o_proj = Linear(attention / "o_proj", config.query_size, hidden)
        self.rotary = Rotary(attention, config.rotary_dim) if config.rotary_dim else None
        self.mlp_norm = RMSNorm(scope / "pre_ff_layernorm", hidden, eps)
        mlp = scope / "feed_forward"
        self.gate_up_proj = Linear(mlp / "gate_up_proj", hidden, 2 * inner, bias=config.mlp_bias)
        self.down_proj = Linear(mlp / "down_proj", inner, hidden, bias=config.mlp_bias)
        self.act = activation(scope, config.hidden_act)


class BlockUse:
    """(x, embedding) [T, hidden_size] each -> [T, hidden_size]: a shared block with what this use adds to it."""

    def __init__(self, config: Zamba2Config, use: int, block: SharedBlock, layer: int, scope: Scope) -> None:
        """Args:
        use: How many uses of shared blocks there are before this one.
        """
        hidden, wide, rank = config.hidden_size, config.block_width, config.adapter_rank
        self.block, self.head_dim = block, config.head_dim
        attention, mlp = block.scope / "self_attn", block.scope / "feed_forward"
        self.added: list[LowRank | None] = [None] * 3
        if config.attention_adapters:
            lists = [attention / f"linear_{name}_adapter_list" / str(use) for name in "qkv"]
            self.added = [LowRank(each, wide, rank, wide) for each in lists]
        self.gate_up_added = LowRank(
            mlp / "gate_up_proj_adapter_list" / str(use), hidden, rank, 2 * config.intermediate_size
        )
        self.attend = (scope / "shared_transformer" / "self_attn").attention(
            config.cache_index(f"model.layers.{layer}.self_attn"), scale=(config.head_dim / 2) ** -0.5
        )
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

    def __init__(self, config: Zamba2Config, layer: int, scope: Scope) -> None:
        inner = scope / "mamba_decoder" if layer in config.hybrid_layers else scope
        self.norm = AddNorm(RMSNorm(inner / "input_layernorm", config.hidden_size, config.rms_norm_eps))
        self.mamba = Mamba2Mixer(inner / "mamba", config.mixer, config.cache_index(f"model.layers.{layer}.mamba"))
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
    """The Zamba2 network."""

    config: Zamba2Config
    layers: list[Zamba2Layer]  # type: ignore[assignment]

    def __init__(self, config: Zamba2Config, scope: Scope) -> None:
        super().__init__(config, scope, Zamba2Layer, norm="final_layernorm")  # type: ignore[arg-type]
        at = [self.body / "layers" / str(layer) for layer in config.hybrid_layers]
        blocks = [SharedBlock(config, each / "shared_transformer") for each in at[: config.num_shared_blocks]]
        for use, (layer, inner) in enumerate(zip(config.hybrid_layers, at, strict=True)):
            self.layers[layer].use = BlockUse(config, use, blocks[use % len(blocks)], layer, inner)
        again = config.hybrid_layers[config.num_shared_blocks :]
        self._copies = tuple(f"model.layers.{layer}.shared_transformer." for layer in again)

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Leaves out what files repeat of shared blocks."""
        return () if name.startswith(self._copies) else ((name, tensor),)

    def _forward(self, batch: ForwardBatch, taps: dict[int, Tensor]) -> Tensor:
        """As `DecoderLM._forward`; layers take the embedding, too."""
        self.use_adapters(batch.lora)
        cos = sin = self._unrotated
        if self.config.rotary_dim:
            cos, sin = self._tables[self.config.rope](batch.positions, max(batch.attention[0].kv_lens))
        embedded, residual = self.embed(batch), None
        x = embedded.clone()  # additions may be written over it
        for i, layer in enumerate(self.layers):
            self._tap(taps, i, x, residual)
            x, residual = layer(x, residual, embedded, cos, sin, batch)
        self._tap(taps, len(self.layers), x, residual)
        hidden: Tensor = self._add_norm(x, residual)[0]
        return hidden

"""Zamba2 (Zyphra 2024, arXiv:2411.15242): Mamba-2 in every layer, and a few attention blocks that layers share.

A shared block sees the residual stream beside the embedding, and what it makes of them is added to what the layer's
mixer takes, not to the stream. Each use of a block has low-rank additions of its own to the block's projections."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import ACTIVATIONS, layer_kinds
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes
from quire_models.mixer_spec import Mamba2Spec, SelfAttentionSpec
from quire_models.recurrent_fields import check_groups
from quire_models.spec import CheckpointNames, LayerSpec, LinearSpec, NetworkSpec, Weight, inside, recast

__all__ = ["LAYER_TYPES", "BlockUseSpec", "SharedAttentionSpec", "Zamba2LayerSpec", "Zamba2Spec", "spec"]

LAYER_TYPES = {"linear_attention": False, "mamba": False, "hybrid": True}
"""Name of a layer's kind -> a shared block stands before its mixer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedAttentionSpec(SelfAttentionSpec):
    """The attention of a shared block, over keys and values of the layer that uses it. Its weights are the block's."""

    @property
    def width(self) -> int:
        """The stream beside the embedding, twice."""
        return 2 * self.in_features

    def weights(self) -> Iterator[Weight]:
        """None: see `BlockUseSpec`."""
        return iter(())


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockUseSpec:
    """down(act(gate) * up) of norm(attention(norm([x, embedding]))), with what this use adds to the block."""

    block: str
    """Full name of the block in the checkpoint, within the first layer that uses it."""
    is_first: bool
    """It is the first use of its block."""
    number: int
    """Uses of shared blocks before this one."""
    attention: SelfAttentionSpec
    act: str
    intermediate_size: int
    mlp_bias: bool
    eps: float
    rank: int
    """Inner width of what each use adds to projections."""
    attention_adapters: bool
    """Queries, keys and values have such additions, too; the feed-forward network always does."""

    def weights(self, layer: str) -> Iterator[Weight]:
        """Those of the block, at its first use, and of this use in `layer`, by their full names."""
        hidden, inner, wide = self.attention.hidden_size, self.intermediate_size, self.attention.in_features
        if self.is_first:
            yield from inside(self.block, self._weights_of_block())

        def linear(name: str, inputs: int, outputs: int, part: str) -> Iterator[Weight]:
            return LinearSpec(name=name, in_features=inputs, out_features=outputs).weights(part)

        for name in "qkv" if self.attention_adapters else "":
            at = f"{self.block}.self_attn.linear_{name}_adapter_list.{self.number}"
            yield from linear(f"{at}.0", wide, self.rank, "attention")
            yield from linear(f"{at}.1", self.rank, wide, "attention")
        at = f"{self.block}.feed_forward.gate_up_proj_adapter_list.{self.number}"
        yield from linear(f"{at}.0", hidden, self.rank, "MLP")
        yield from linear(f"{at}.1", self.rank, 2 * inner, "MLP")
        yield from linear(f"{layer}.linear", hidden, hidden, "attention")

    def _weights_of_block(self) -> Iterator[Weight]:
        hidden, inner = self.attention.hidden_size, self.intermediate_size
        yield from inside("self_attn", SelfAttentionSpec.weights(replace(self.attention, name="")))
        for name, inputs, outputs in (("gate_up_proj", hidden, 2 * inner), ("down_proj", inner, hidden)):
            layer = LinearSpec(name=name, in_features=inputs, out_features=outputs, bias=self.mlp_bias)
            yield from inside("feed_forward", layer.weights("MLP"))
        yield Weight("input_layernorm.weight", (self.attention.in_features,), "norms")
        yield Weight("pre_ff_layernorm.weight", (hidden,), "norms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Zamba2LayerSpec(LayerSpec):
    """x + mamba(norm(x)), or x + mamba(norm(x + linear(block(x, embedding))))."""

    use: BlockUseSpec | None
    built_by: ClassVar[str] = "quire_models.families.zamba2_layers:Zamba2Layer"

    def weights(self) -> Iterator[Weight]:
        """Parameters of the mixer, and of the block where it is used first."""
        yield from LayerSpec.weights(self)
        if self.use is not None:
            yield from self.use.weights(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Zamba2Spec(NetworkSpec):
    """A network of such layers."""

    built_by: ClassVar[str] = "quire_models.families.zamba2_layers:Zamba2ForCausalLM"


def spec(config: Fields) -> NetworkSpec:
    """Heads of the attention share twice the hidden size. Time steps have a lower bound, as in Transformers' scan."""
    sizes = _sizes(config)
    mamba, kinds = (
        _mamba(config, sizes.hidden_size),
        layer_kinds(config, "layers_block_type", sizes.num_layers, LAYER_TYPES),
    )
    hybrid = [layer for layer in sizes.layers if kinds[layer]]
    num_blocks = min(config.integer("num_mem_blocks", default=1, minimum=1), len(hybrid))
    attention = sizes.attention(
        name="shared_transformer.self_attn", in_features=2 * sizes.hidden_size, scale=(sizes.head_dim / 2) ** -0.5
    )
    shared = recast(SharedAttentionSpec, attention)
    fields: dict[str, Any] = {
        "attention": shared,
        "act": sizes.act,
        "intermediate_size": sizes.intermediate_size,
        "mlp_bias": mamba.proj_bias,
        "eps": sizes.eps,
        "rank": config.integer("adapter_rank", default=128, minimum=1),
        "attention_adapters": config.flag("use_shared_attention_adapter", default=False),
    }
    if fields["attention_adapters"] and sizes.num_kv_heads != sizes.num_heads:
        raise CheckpointError(
            f"{config.source}: use_shared_attention_adapter needs as many num_key_value_heads as num_attention_heads"
        )

    def layer_of(layer: int) -> Zamba2LayerSpec:
        name = f"model.layers.{layer}"
        if not kinds[layer]:
            norm = sizes.rms_norm("input_layernorm")
            return Zamba2LayerSpec(name=name, mixers=(mamba,), input_norm=norm, use=None)
        number = hybrid.index(layer)
        block = f"model.layers.{hybrid[number % num_blocks]}.shared_transformer"
        use = BlockUseSpec(block=block, is_first=number < num_blocks, number=number, **fields)
        norm, mixer = sizes.rms_norm("mamba_decoder.input_layernorm"), replace(mamba, name="mamba_decoder.mamba")
        return Zamba2LayerSpec(name=name, mixers=(mixer, shared), input_norm=norm, use=use)

    return sizes.network(
        map(layer_of, sizes.layers),
        kind=Zamba2Spec,
        final_norm="final_layernorm",
        caches_by_mixer=True,
        checkpoint=CheckpointNames(
            ignored_prefixes=tuple(f"model.layers.{layer}.shared_transformer." for layer in hybrid[num_blocks:])
        ),
    )


def _sizes(config: Fields) -> DecoderSizes:
    hidden, heads = config.integer("hidden_size", minimum=1), config.integer("num_attention_heads", minimum=1)
    if 2 * hidden % heads:
        raise CheckpointError(
            f"{config.source}: num_attention_heads ({heads}) must divide twice the hidden_size ({hidden})"
        )
    config.fixed("tie_word_embeddings", True)  # Transformers' flag of the shared blocks, too
    sizes = decoder_sizes(
        config.named(head_dim="attention_head_dim"),
        tied=True,
        head_dim=2 * hidden // heads,
        act="gelu",
        acts=ACTIVATIONS,
        eps=1e-5,
        rotary=config.flag("use_mem_rope", default=False),
        inner_factor=4,
    )
    if sizes.head_dim * heads != 2 * hidden:
        raise CheckpointError(
            f"{config.source}: attention_head_dim must be 2 * hidden_size / num_attention_heads "
            f"({2 * hidden // heads}), is {sizes.head_dim}"
        )
    return sizes


def _mamba(config: Fields, hidden: int) -> Mamba2Spec:
    heads = config.integer("n_mamba_heads", default=8, minimum=1)
    inner = int(config.number("mamba_expand", default=2) * hidden)
    if inner % heads:
        raise CheckpointError(f"{config.source}: n_mamba_heads ({heads}) must divide the mixer's width ({inner})")
    mixer = Mamba2Spec(
        hidden_size=hidden,
        num_heads=heads,
        head_dim=inner // heads,
        state_size=config.integer("mamba_d_state", default=64, minimum=1),
        num_groups=config.integer("mamba_ngroups", default=1, minimum=1),
        conv_kernel=config.integer("mamba_d_conv", default=4, minimum=1),
        conv_bias=True,
        proj_bias=config.flag("add_bias_linear", default=False),
        eps=1e-5,
        dt_limit=(config.number("time_step_min", default=0.001, minimum=0.0), float("inf")),
    )
    check_groups(mixer, config.source)
    return mixer

"""DeciLM and Llama-Nemotron (Bercovich et al. 2025, arXiv:2411.19146): Llama whose layers were searched for one by one:
each has heads and a width of its own, and may lack a part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import GATED_ACTS, hidden_act
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes
from quire_models.spec import LayerSpec, NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """`block_configs` says of each layer how many query heads share a key-value head, and how wide it is; in DeciLM-7B
    `num_key_value_heads_per_layer` says how many key-value heads each has."""
    blocks = config.get("block_configs")
    if blocks is None and config.get("num_key_value_heads_per_layer") is not None:
        return _of_kv_heads(config)
    layers = config.integer("num_hidden_layers", minimum=1)
    if not isinstance(blocks, list) or len(blocks) != layers or not all(isinstance(each, Mapping) for each in blocks):
        raise CheckpointError(f"{config.source}: block_configs must describe each of {layers} layers")
    widest = config.integer("hidden_size", minimum=1) * 4
    sizes = decoder_sizes(config.named(num_key_value_heads="-").with_default("intermediate_size", widest))
    bias, mlp_bias = config.flag("attention_bias", default=False), config.flag("mlp_bias", default=False)
    described = (Fields(block, f"{config.source}: block_configs[{layer}]") for layer, block in enumerate(blocks))
    return sizes.network(tuple(_layers(sizes, described, bias, mlp_bias)))


def _of_kv_heads(config: Fields) -> NetworkSpec:
    """Layers that differ in their key-value heads alone."""
    sizes = decoder_sizes(config.named(num_key_value_heads="-"))
    name = "num_key_value_heads_per_layer"
    numbers = config.get(name)
    if not isinstance(numbers, list) or len(numbers) != sizes.num_layers:
        raise CheckpointError(f"{config.source}: {name} must have a number for each of {sizes.num_layers} layers")
    for number in numbers:
        if type(number) is not int or number < 1 or sizes.num_heads % number:
            raise CheckpointError(
                f"{config.source}: {name} must have divisors of num_attention_heads ({sizes.num_heads}), has {number!r}"
            )
    bias = config.flag("attention_bias", default=False)
    mlp = sizes.gated_mlp(bias=config.flag("mlp_bias", default=False))
    return sizes.network(
        sizes.pre_norm(layer, sizes.attention(bias=bias, num_kv_heads=number), mlp)
        for layer, number in enumerate(numbers)
    )


def _layers(sizes: DecoderSizes, blocks: Iterator[Fields], bias: bool, mlp_bias: bool) -> Iterator[LayerSpec]:
    for layer, block in enumerate(blocks):
        attention, ffn = block.object("attention"), block.object("ffn")
        if attention is None or ffn is None:
            raise CheckpointError(f"{block.source}: attention and ffn must both be described")
        for part in (attention, ffn):
            part.fixed("replace_with_linear", False)
            part.fixed("sparsify")
        parts: dict[str, Any] = {"mixers": ()}
        if not attention.flag("no_op", default=False):
            shared = attention.integer("n_heads_in_group", minimum=1)
            window = attention.integer("window_length", default=None, minimum=1)
            if window is not None:
                attention.fixed("num_sink_tokens", 0)
                attention.fixed("unshifted_sink", False)
            mixer = sizes.attention(bias=bias, num_kv_heads=sizes.num_heads // shared, sliding_window=window)
            parts = {"mixers": (mixer,), "input_norm": sizes.rms_norm("input_layernorm")}
        if not ffn.flag("no_op", default=False):
            act = hidden_act(ffn, default="silu", acts=GATED_ACTS)
            parts["feed_forward"] = sizes.gated_mlp(inner=_width(ffn, sizes.hidden_size), act=act, bias=mlp_bias)
            parts["feed_forward_norm"] = sizes.rms_norm("post_attention_layernorm")
        yield LayerSpec(name=f"model.layers.{layer}", **parts)


def _width(ffn: Fields, hidden_size: int) -> int:
    """As given, or two thirds of `ffn_mult` times the hidden size, rounded up to a multiple of 256."""
    if ffn.get("ffn_mult") is None:
        return ffn.integer("intermediate_size", minimum=1)
    return -(-int(2 * ffn.number("ffn_mult", above=0.0) * hidden_size / 3) // 256) * 256

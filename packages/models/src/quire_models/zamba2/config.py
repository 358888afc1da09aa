"""Zamba2's config.json."""

from __future__ import annotations

from dataclasses import dataclass

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import ACTIVATIONS, decoder_fields
from quire_models.mixer_shapes import Mamba2Shape, WeightCount
from quire_models.recurrent_config import LayerCache, RecurrentConfig

__all__ = ["Zamba2Config", "read_config"]

LAYER_TYPES = {"linear_attention": False, "mamba": False, "hybrid": True}
"""Name of a layer's kind -> a shared block stands before its mixer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Zamba2Config(RecurrentConfig):
    """A Mamba-2 mixer in every layer, and before some of them one of a few blocks that layers share in turn."""

    mixer: Mamba2Shape
    hybrid_layers: tuple[int, ...]
    """Layers that use a shared block."""
    num_shared_blocks: int
    adapter_rank: int
    """Inner width of what each use of a shared block adds to its projections."""
    attention_adapters: bool
    """Queries, keys and values have such additions, too; the feed-forward network always does."""

    @property
    def block_width(self) -> int:
        """What a shared block's attention takes: the residual stream beside the embedding."""
        return 2 * self.hidden_size


def read_config(config: Fields) -> Zamba2Config:
    """Heads of the attention share twice the hidden size. Time steps have a lower bound, as in Transformers' scan."""
    hidden, heads = config.integer("hidden_size", minimum=1), config.integer("num_attention_heads", minimum=1)
    if 2 * hidden % heads:
        raise CheckpointError(
            f"{config.source}: num_attention_heads ({heads}) must divide twice the hidden_size ({hidden})"
        )
    config.fixed("tie_word_embeddings", True)  # Transformers' flag of the shared blocks, too
    rotary = config.flag("use_mem_rope", default=False)
    values = decoder_fields(
        config.named(head_dim="attention_head_dim"),
        tied=True,
        head_dim=2 * hidden // heads,
        act="gelu",
        acts=ACTIVATIONS,
        eps=1e-5,
        rotary=rotary,
        inner_factor=4,
    )
    if values["head_dim"] * heads != 2 * hidden:
        raise CheckpointError(
            f"{config.source}: attention_head_dim must be 2 * hidden_size / num_attention_heads "
            f"({2 * hidden // heads}), is {values['head_dim']}"
        )
    mixer = _mixer(config, hidden)
    layers, kinds = values["num_layers"], _kinds(config, values["num_layers"])
    hybrid = tuple(layer for layer in range(layers) if kinds[layer])
    blocks = min(config.integer("num_mem_blocks", default=1, minimum=1), len(hybrid))
    rank = config.integer("adapter_rank", default=128, minimum=1)
    attention_adapters = config.flag("use_shared_attention_adapter", default=False)
    if attention_adapters and values["num_kv_heads"] != heads:
        raise CheckpointError(
            f"{config.source}: use_shared_attention_adapter needs as many num_key_value_heads as num_attention_heads"
        )
    caches = []
    for layer in range(layers):
        caches += [LayerCache(f"model.layers.{layer}.mamba", mixer.states)]
        caches += [LayerCache(f"model.layers.{layer}.self_attn")] if kinds[layer] else []
    inner, bias, wide, uses = values["intermediate_size"], mixer.proj_bias, 2 * hidden, len(hybrid)
    kv = values["num_kv_heads"] * values["head_dim"]
    added = uses * attention_adapters * 3
    return Zamba2Config(
        **values | {"mlp_bias": bias, "sliding_windows": (None,) * len(caches)},
        mixer=mixer,
        mixer_width=max(mixer.width, 2 * wide),
        caches=tuple(caches),
        hybrid_layers=hybrid,
        num_shared_blocks=blocks,
        adapter_rank=rank,
        attention_adapters=attention_adapters,
        weights={
            "attention": WeightCount(
                (
                    (wide, wide, blocks),
                    (kv, wide, 2 * blocks),
                    (hidden, wide, blocks),
                    (rank, wide, added),
                    (wide, rank, added),
                    (hidden, hidden, uses),
                )
            ),
            "MLP": WeightCount(
                ((2 * inner, hidden, blocks), (hidden, inner, blocks), (rank, hidden, uses), (2 * inner, rank, uses)),
                blocks * bias * (2 * inner + hidden),
            ),
            "state space": mixer.weights(layers),
            "norms": WeightCount(others=(layers + 1 + blocks) * hidden + blocks * wide),
        },
    )


def _mixer(config: Fields, hidden: int) -> Mamba2Shape:
    heads = config.integer("n_mamba_heads", default=8, minimum=1)
    inner = int(config.number("mamba_expand", default=2) * hidden)
    if inner % heads:
        raise CheckpointError(f"{config.source}: n_mamba_heads ({heads}) must divide the mixer's width ({inner})")
    mixer = Mamba2Shape(
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
    mixer.check(config.source)
    return mixer


def _kinds(config: Fields, layers: int) -> list[bool]:
    kinds = config.get("layers_block_type")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in LAYER_TYPES for kind in kinds):
        raise CheckpointError(
            f"{config.source}: layers_block_type must name one of {', '.join(LAYER_TYPES)} for each of {layers} "
            f"layers, is {kinds!r}"
        )
    return [LAYER_TYPES[kind] for kind in kinds]

"""Config.json of Llama 4's text model."""

from __future__ import annotations

from dataclasses import dataclass

from quire_interfaces import CheckpointError, ChunkedLocalSpec, Fields, KVCacheSpec
from quire_models.config_fields import decoder_fields
from quire_models.moe_config import MoEConfig, expert_counts
from quire_models.smollm3.config import rotated_layers

__all__ = ["Llama4Config", "read_config"]

KINDS = ("chunked_attention", "full_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama4Config(MoEConfig):
    """Layers that know positions and attend within chunks, and layers that know none and attend to everything."""

    rotated_layers: tuple[bool, ...]
    """Per layer."""
    chunks: tuple[int | None, ...]
    """Per layer: tokens of a chunk; None where a layer attends to everything."""
    normed_heads: bool
    """Rotated queries and keys are normalised, without a weight."""
    floor_scale: int
    """Tokens after which queries without positions begin to grow."""
    attn_scale: float
    """How much they grow with the logarithm of the position; 0 for not at all."""

    def kv_cache_specs(self, block_size: int, dtype: str) -> dict[str, KVCacheSpec]:
        """See `ModelConfig.kv_cache_specs`."""
        # No zero-argument super: the class is made anew with slots.
        specs = MoEConfig.kv_cache_specs(self, block_size, dtype)
        for name, chunk in zip(list(specs), self.chunks, strict=True):
            if chunk is not None:
                specs[name] = ChunkedLocalSpec(
                    block_size=block_size,
                    num_kv_heads=self.num_kv_heads,
                    head_dim=self.head_dim,
                    dtype=dtype,
                    chunk_tokens=chunk,
                )
        return specs


def read_config(config: Fields) -> Llama4Config:
    """`intermediate_size` is that of an expert, `intermediate_size_mlp` that of layers without."""
    named = config.named(intermediate_size="intermediate_size_mlp")
    values = decoder_fields(named, head_dim=128, theta=500000.0, eps=1e-5)
    layers, bias = values["num_layers"], config.flag("attention_bias", default=False)
    num_experts, per_token = expert_counts(config, "num_local_experts", "num_experts_per_tok")
    inner = config.integer("intermediate_size", minimum=1)
    rotated = rotated_layers(config, layers)
    tuned = config.flag("attn_temperature_tuning", default=True)
    values |= {"qkv_bias": bias, "attention_out_bias": bias}
    return Llama4Config(
        **values,
        sparse_layers=_sparse_layers(config, layers),
        num_experts=num_experts,
        num_experts_per_tok=per_token,
        moe_intermediate_size=inner,
        shared_intermediate_size=inner,
        rotated_layers=rotated,
        chunks=_chunks(config, rotated),
        normed_heads=config.flag("use_qk_norm", default=True),
        floor_scale=config.integer("floor_scale", default=8192, minimum=1),
        attn_scale=config.number("attn_scale", default=0.1) if tuned else 0.0,
    )


def _sparse_layers(config: Fields, layers: int) -> tuple[bool, ...]:
    listed = config.get("moe_layers")
    if listed is None:
        step = config.integer("interleave_moe_layer_step", default=1, minimum=1)
        listed = list(range(step - 1, layers, step))
    if not isinstance(listed, list) or any(layer not in range(layers) for layer in listed):
        raise CheckpointError(f"{config.source}: moe_layers must list some of {layers} layers, is {listed!r}")
    return tuple(layer in listed for layer in range(layers))


def _chunks(config: Fields, rotated: tuple[bool, ...]) -> tuple[int | None, ...]:
    chunk = config.integer("attention_chunk_size", default=8192, minimum=1)
    kinds = config.get("layer_types") or [KINDS[0] if each else KINDS[1] for each in rotated]
    if not isinstance(kinds, list) or len(kinds) != len(rotated) or any(kind not in KINDS for kind in kinds):
        raise CheckpointError(
            f"{config.source}: layer_types must name {' or '.join(KINDS)} for each of {len(rotated)} layers, is "
            f"{kinds!r}"
        )
    return tuple(chunk if kind == KINDS[0] else None for kind in kinds)

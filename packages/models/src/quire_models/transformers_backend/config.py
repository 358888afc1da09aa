"""What is read of the config.json of an architecture that Quire has no network of its own for. Free of torch.

Only what planners and the engine ask: Transformers reads the rest. When the network is built it is checked that both
have understood the same.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import ClassVar

from quire_interfaces import Fields
from quire_models.config_fields import layer_windows
from quire_models.decoder_sizes import DecoderSizes, decoder_sizes
from quire_models.media_spec import cross_attention_layers
from quire_models.spec import LayerSpec, NetworkSpec, recast

__all__ = ["FallbackSpec", "fallback_spec", "stored_parameters"]

UNSUPPORTED = {
    "index_topk": "sparse attention",
    "ssm_cfg": "recurrent layers",
    "mamba_d_state": "recurrent layers",
    "linear_conv_kernel_dim": "recurrent layers",
    "conv_kernel_size": "recurrent layers",
    "is_encoder_decoder": "an encoder",
    "auto_map": "code of its own",
    "attention_chunk_size": "chunked attention",
}
"""Field of config.json -> what it says that the network has, which this backend does not run."""

SYNONYMS = {
    "hidden_size": ("d_model", "n_embd"),
    "num_hidden_layers": ("num_layers", "n_layer", "n_layers"),
    "num_attention_heads": ("num_heads", "n_head", "n_heads"),
    "head_dim": ("attention_head_dim",),
    "max_position_embeddings": ("n_positions", "max_seq_len", "max_target_positions"),
}
"""Name of a field -> other names that classes have for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackSpec(NetworkSpec):
    """Of a network that Transformers runs, what its attention keeps, and the sizes that planners ask for."""

    shares_heads: ClassVar[bool] = False
    built_by: ClassVar[str] = "quire_models.transformers_backend.model:TransformersLM"


def fallback_spec(config: Fields) -> NetworkSpec:
    """Sizes, heads and windows under the names that most configurations use."""
    for name in UNSUPPORTED:
        config.fixed(name, False)
    named = config.named(hidden_act="-", intermediate_size="-", rms_norm_eps="-", **_names(config))
    sizes = decoder_sizes(named, rotary=False, inner_factor=4)
    sizes = replace(sizes, num_layers=sizes.num_layers * attentions_per_layer(config))
    windows: tuple[int | None, ...] = (None,) * sizes.num_layers
    if config.flag("use_sliding_window", default=True):
        context = sizes.max_model_len
        windows = tuple(
            None if window and window >= context else window for window in layer_windows(config, sizes.num_layers)
        )
    num_kv_heads, head_dim = _cache_shape(config, sizes, windows)
    cross = cross_attention_layers(config)
    network = sizes.network(
        (
            LayerSpec(
                name=f"model.layers.{layer}",
                mixers=()
                if layer in cross
                else (sizes.attention(num_kv_heads=num_kv_heads, head_dim=head_dim, sliding_window=window),),
            )
            for layer, window in enumerate(windows)
        ),
        final_norm=None,
    )
    return recast(FallbackSpec, network)


def attentions_per_layer(config: Fields) -> int:
    """Attentions with a cache of their own, for each layer that config.json counts."""
    if config.get("model_type") == "longcat_flash":
        return 2
    if config.get("model_type") == "hrm_text" and config.get("num_layers_per_stack") is None:
        # Its two stacks are run again and again.
        return config.integer("H_cycles", default=2) * (config.integer("L_cycles", default=3) + 1)
    return 1


def _cache_shape(config: Fields, sizes: DecoderSizes, windows: tuple[int | None, ...]) -> tuple[int, int]:
    """Heads and dimensions of a token's keys, and values, in the cache: the most that any layer needs."""
    heads, kv_heads, head_dim = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
    model_type = config.text("model_type", default="")
    if config.integer("kv_lora_rank", default=0):
        # Latent attention: Transformers hands out the keys and values that it makes of the latents, for each head.
        return heads, config.integer("qk_nope_head_dim") + config.integer("qk_rope_head_dim")
    if model_type == "jetmoe":  # keys are repeated for the experts that make the queries
        return heads, config.integer("kv_channels")
    if model_type == "hrm_text":
        return heads, head_dim
    if model_type == "mimo_v2_flash" and any(windows):
        return 2 * kv_heads, head_dim  # in layers with a window
    if model_type == "dbrx":
        return Fields(config.get("attn_config") or {}, f"{config.source}: attn_config").integer(
            "kv_n_heads", default=8
        ), head_dim
    layers = [
        Fields(layer, f"{config.source}: per_layer_config") for layer in (config.get("per_layer_config") or {}).values()
    ]
    if model_type.startswith("gemma4") and not layers:
        layers = [config.named(head_dim="global_head_dim", num_key_value_heads="num_global_key_value_heads")]
        layers[0] = layers[0].with_default("head_dim", 512)
    return (
        max([kv_heads, *(layer.integer("num_key_value_heads", default=0) for layer in layers)]),
        max([head_dim, *(layer.integer("head_dim", default=0) for layer in layers)]),
    )


def _names(config: Fields) -> dict[str, str]:
    """Llama's names -> those of this config.json."""
    names = {
        name: next((other for other in others if config.get(other) is not None), name)
        for name, others in SYNONYMS.items()
        if config.get(name) is None
    }
    if config.get("decoder_layers") is not None:
        # Beside these stand fields of the encoder that the decoder once had.
        names.update(
            hidden_size="d_model",
            num_hidden_layers="decoder_layers",
            num_attention_heads="decoder_attention_heads",
            num_key_value_heads="decoder_attention_heads",
        )
    return names


def stored_parameters(folder: Path) -> int | None:
    """Weights in the safetensors files of a checkpoint, from their headers; None when there are none."""
    files = sorted(folder.glob("*.safetensors"))
    total = 0
    for file in files:
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        total += sum(prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total if files else None

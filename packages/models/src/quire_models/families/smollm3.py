"""SmolLM3 (Hugging Face 2025): Llama in which every fourth layer knows no positions."""

from __future__ import annotations

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import layer_windows
from quire_models.decoder_sizes import decoder_sizes
from quire_models.spec import NetworkSpec

__all__ = ["rotated_layers", "spec"]


def spec(config: Fields) -> NetworkSpec:
    """Layers without positions may have windows."""
    bias = config.flag("attention_bias", default=False)
    sizes = decoder_sizes(config, tied=True, theta=2000000.0)
    mlp = sizes.gated_mlp(bias=config.flag("mlp_bias", default=False))
    rotated = rotated_layers(config, sizes.num_layers)
    windows: tuple[int | None, ...] = (None,) * sizes.num_layers
    if config.flag("use_sliding_window", default=False):
        windows = layer_windows(config, sizes.num_layers, default=tuple(not each for each in rotated))
    return sizes.network(
        sizes.pre_norm(
            layer,
            sizes.attention(bias=bias, sliding_window=window, rope=sizes.rope if rotated[layer] else None),
            mlp,
        )
        for layer, window in enumerate(windows)
    )


def rotated_layers(config: Fields, layers: int) -> tuple[bool, ...]:
    """Per layer, from `no_rope_layers`: 1 where a layer is rotated; all but every fourth when it is not given.

    Raises:
        CheckpointError: It is no such list.
    """
    interval = config.integer("no_rope_layer_interval", default=4, minimum=1)
    rotated = config.get("no_rope_layers") or [(layer + 1) % interval != 0 for layer in range(layers)]
    if not isinstance(rotated, list) or len(rotated) != layers or any(each not in (0, 1) for each in rotated):
        raise CheckpointError(f"{config.source}: no_rope_layers must be a list of {layers} 0s and 1s, is {rotated!r}")
    return tuple(map(bool, rotated))

"""EXAONE 4 (LG AI Research 2025): norms behind the parts, normalised heads, full attention without positions."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.config_fields import layer_windows
from quire_models.decoder_sizes import decoder_sizes
from quire_models.spec import NetworkSpec

__all__ = ["spec"]


def spec(config: Fields) -> NetworkSpec:
    """Three sliding layers, then one of full attention, unless `layer_types` says otherwise. Where some layers slide,
    those of full attention know no positions."""
    sizes = decoder_sizes(config, eps=1e-5)
    slides: tuple[bool, ...] | None = None
    if config.get("layer_types") is None and config.get("sliding_window") is not None:
        period = config.integer("sliding_window_pattern", default=4, minimum=1)
        slides = tuple((layer + 1) % period != 0 for layer in sizes.layers)
    windows = layer_windows(config, sizes.num_layers, default=slides)
    norms = sizes.head_norms()
    return sizes.network(
        sizes.post_norm(
            layer,
            sizes.attention(
                sliding_window=window,
                rope=sizes.rope if window is not None or not any(windows) else None,
                **norms,
            ),
        )
        for layer, window in enumerate(windows)
    )
